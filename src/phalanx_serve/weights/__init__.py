"""Weights that are larger than memory: read in the order of layers while the layers before are computed."""

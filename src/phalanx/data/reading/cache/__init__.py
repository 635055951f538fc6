"""Datasets in object stores, read through a cache on this machine of the blocks that were asked for."""

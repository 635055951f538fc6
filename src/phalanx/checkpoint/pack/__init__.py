"""Packs: a model's weights as one file in the order of its layers, which is how a server reads them."""

"""Packs: a model's weights as one file in the order of its layers, which is the order in which a server reads them."""

"""The checkpoint format: boxes, rank images, checksummed blocks, manifests and restore plans."""

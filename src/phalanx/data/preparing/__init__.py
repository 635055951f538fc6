"""From texts to a dataset by one process: corpora, encoding, packing."""

"""Steps that every preparation takes (corpora, splits, encoding, packing), and preparation by one process."""

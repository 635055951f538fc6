"""Parts of every preparation (corpora, splits, encoding, packing), and preparation in one process."""

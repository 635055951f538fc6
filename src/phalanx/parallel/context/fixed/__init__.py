"""Context tiles: the sequence in pieces that the run fixes, so that no context degree changes a bit."""

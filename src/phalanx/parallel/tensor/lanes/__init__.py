"""Lanes: the width of the model in pieces that the run fixes, so that no tensor degree changes a bit."""

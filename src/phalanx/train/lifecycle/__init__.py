"""The life of a rank and of its run directory: prepared, assembled, trained, ended."""

"""The life of a rank: assembled, trained, ended."""

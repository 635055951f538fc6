"""Places that hold checkpoints, and what is done with a committed one: restore, verify, digest, retention."""

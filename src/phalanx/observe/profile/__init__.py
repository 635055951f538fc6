"""A profile between two processes: how one is asked for, and the file that a rank keeps a recorded step in."""

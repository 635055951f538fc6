"""``phalanx ui``: dashboard of run directories, its JSON interface, and its export to one file."""

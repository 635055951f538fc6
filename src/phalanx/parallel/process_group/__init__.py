"""Process groups: rendezvous, aborting collectives, and forming a new group in running processes."""

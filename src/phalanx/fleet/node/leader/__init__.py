"""Who leads this node's run: the coordinator's addresses, the succession of a lost one, and other starts of the run."""

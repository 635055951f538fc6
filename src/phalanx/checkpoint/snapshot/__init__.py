"""In-memory snapshots: the memory that outlives workers, its data port, and restoring from it."""

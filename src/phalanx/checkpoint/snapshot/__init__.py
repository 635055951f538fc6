"""In-memory snapshots: memory that outlives workers, its data port, and restores from it."""

"""Output and log records of a run's processes: captured as lines of JSON with time and place, bounded on disk, free of secrets."""

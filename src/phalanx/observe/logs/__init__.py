"""What the processes of a run print and log: caught, made into lines of JSON with time and place, bounded on disk, free of secrets."""

"""What the tasks of a preparation do with their portions."""

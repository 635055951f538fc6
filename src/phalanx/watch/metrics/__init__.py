"""The metrics of runs as one sees them from outside, from their directories: a run that is dead cannot say so itself."""

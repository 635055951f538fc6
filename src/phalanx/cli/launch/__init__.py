"""Commands that start a run on a cluster, and follow it there."""

"""A worker: the process that holds one rank, or none, and takes its agent's orders."""

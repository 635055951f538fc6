"""A worker: the process that holds one rank, or none, and follows its agent's orders."""

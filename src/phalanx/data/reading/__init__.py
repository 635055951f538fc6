"""Read a run's sources, in folders or object stores, as samples of tokens."""

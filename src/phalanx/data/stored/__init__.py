"""A prepared dataset as files: its index, token shards, their sums, and copies of it."""

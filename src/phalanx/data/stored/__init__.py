"""Files of a prepared dataset: its index, token shards, block sums, and copies."""

"""Several workers of one service: how pages of keys and values travel between them."""

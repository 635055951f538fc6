"""Several workers of one service: their processes, the router's shell, and how pages of keys and values travel between them."""

"""Scaling laws, published and fitted to small runs, and the size and tokens that they call optimal for a budget."""

"""Scaling laws, published and fitted to small runs, and the compute-optimal size and tokens for a budget."""

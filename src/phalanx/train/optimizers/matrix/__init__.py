"""Optimizers that look at a matrix as a whole, and who holds which part of it."""

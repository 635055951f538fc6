"""Optimizers: AdamW for single elements, and those that look at a matrix as a whole."""

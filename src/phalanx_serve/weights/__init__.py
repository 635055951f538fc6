"""Weights larger than memory: streamed in the order of the layers during computation."""

"""Kernels that read memory once where a chain of PyTorch operations reads it many times, with the same bits."""

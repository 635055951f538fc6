"""Kernels for a few fp32 rows on a CPU, whose bits are those of PyTorch's among many: products, attention, and whole layers."""

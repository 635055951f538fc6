"""Attention: its forms, its kernels, rotary positions, and the cache of keys and values."""

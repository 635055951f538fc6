"""Attention: its forms, its kernels, rotary positions, and the KV cache."""

"""Transforms of a plain model, applied from outside: 8-bit formats, recomputation and offload."""

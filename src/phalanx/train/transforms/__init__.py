"""What is applied to a plain model from outside: 8-bit formats, recomputation and offload."""

"""Arithmetic whose bits are the same on every x86-64 processor with AVX2 and FMA: ``runtime.numerics = "portable"``."""

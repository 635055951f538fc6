"""Comparison of two runs: what they say of themselves, and a step that is computed again under a witness."""

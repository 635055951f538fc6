"""Comparison of two runs: their records, and a step that is computed again under a witness."""

"""The order of a run: permutations and fair mixtures, in integers alone."""

"""The order of a run: permutations and fair mixtures, with integers only."""

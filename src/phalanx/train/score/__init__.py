"""Scores: log-probabilities of given tokens, by the arithmetic that a run was trained with."""

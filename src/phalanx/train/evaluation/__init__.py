"""Evaluation of a run's weights: the loss on held-out text, and tasks."""

"""Experiment trackers of a run."""

"""Trackers that a run's points are sent to."""

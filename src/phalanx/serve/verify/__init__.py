"""Exported folders tried on the engines that they are for: their greedy texts against the run's own model."""

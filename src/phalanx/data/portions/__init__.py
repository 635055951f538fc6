"""Preparation of data at scale: a recipe becomes a plan, and the plan a map over a list of portions that any engine can run."""

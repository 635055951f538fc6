"""Preparation of data at scale: a recipe becomes a plan, which any engine runs as a map over portions."""

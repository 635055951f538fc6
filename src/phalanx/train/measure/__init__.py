"""Measurements for the planner: calibration, memory of a step, and dry runs of one rank of a large fleet."""

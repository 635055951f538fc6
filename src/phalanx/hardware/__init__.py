"""Sourced facts about accelerators and clusters, and the measured peak of the machine at hand."""

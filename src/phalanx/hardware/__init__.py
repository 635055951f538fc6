"""Sourced facts about accelerators and clusters, the measured peak of the machine at hand, and kernels made for it."""

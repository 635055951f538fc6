"""Engines that start a run on many nodes: each gets nodes from a scheduler or a list, and runs one agent on every node."""

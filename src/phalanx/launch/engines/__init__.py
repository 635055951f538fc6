"""Engines that start a run on many nodes: each asks a scheduler, or none, for nodes and runs one agent on every one."""

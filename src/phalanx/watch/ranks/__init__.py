"""The ranks of a run side by side: where each one sits, and which are slower than their peers."""

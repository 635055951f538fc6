"""Sums of slots' gradients in integers, in which no order of addition shows."""

"""Lanes: fixed divisions of the model's width, so that the bits do not depend on the tensor degree."""

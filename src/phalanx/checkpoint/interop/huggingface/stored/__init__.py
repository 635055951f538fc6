"""A Hugging Face folder read where it lies: its tensors, a tier of them, and the run directory that stands in for it."""

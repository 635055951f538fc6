"""Hugging Face's model families as tables: the format of a family, dense families, and mixtures of experts."""

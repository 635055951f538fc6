"""Hugging Face's model families as tables: what a family is, those that are dense, and mixtures of experts."""

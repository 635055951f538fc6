"""Tokenizers as others publish them, brought into the one form that is kept: a ``tokenizer.json``."""

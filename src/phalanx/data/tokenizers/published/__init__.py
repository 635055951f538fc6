"""Published tokenizers in several formats, converted to a ``tokenizer.json``."""

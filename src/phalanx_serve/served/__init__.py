"""Served models: a run's weights in an engine, with tokenizer and chat template."""

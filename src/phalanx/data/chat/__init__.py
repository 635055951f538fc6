"""Conversations as training data: framed by a model's chat template, with a loss on the assistant's text."""

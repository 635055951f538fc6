"""Hugging Face model folders: read into run directories, and written from checkpoints."""

"""Asynchronous save: one memory copy on the critical path, a thread that writes."""

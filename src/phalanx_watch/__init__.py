"""Views of a run for people and tools: the dashboard, curves, comparisons, logs, profiles, and diagnosis."""

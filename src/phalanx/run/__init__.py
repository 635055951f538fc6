"""The run file: one typed, validated description of a run."""

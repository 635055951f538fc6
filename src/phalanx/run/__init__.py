"""What the user writes: one typed, validated description of a run."""

"""The axes of parallelism applied to a plain model, and reductions whose bits do not depend on the number of ranks."""

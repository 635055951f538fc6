"""Facts of a model without building it: shapes, presets, counts, stages, and what each rank holds. No torch."""

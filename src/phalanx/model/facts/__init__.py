"""Facts of a model without building it: shapes, presets, counts, stages, and each rank's parameters. No torch."""

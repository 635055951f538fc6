"""Every layout that a model, a batch and a number of accelerators allow: conditions, geometries, and the axes beside them."""

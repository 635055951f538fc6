"""Numbers of a run over time: read incrementally, stored in compact columns, and reduced to the resolution of a picture."""

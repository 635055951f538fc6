"""Recording of the time of a few steps at a request; without one it costs nothing."""

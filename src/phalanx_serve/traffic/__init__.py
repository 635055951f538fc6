"""Decisions of serving: what a request is, whose rows a step computes, which worker does it. No clock, no I/O, no torch."""

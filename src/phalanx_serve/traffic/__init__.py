"""Decisions of serving: scheduling, routing, leases and audits. No clock, no I/O, no torch."""

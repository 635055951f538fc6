"""Health: checks before and during a run, stragglers, and audits for silent data corruption."""

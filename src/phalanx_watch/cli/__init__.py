"""Commands that inspect a run."""

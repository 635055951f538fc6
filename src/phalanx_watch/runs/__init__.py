"""Many runs at once: list, labels, comparison, recordings, removal and reproduction."""

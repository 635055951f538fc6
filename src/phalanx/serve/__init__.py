"""Text from trained weights."""

"""Statistics of each layer during training."""

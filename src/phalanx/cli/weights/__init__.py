"""Commands for weights: checkpoints, conversion, hashes and text generation."""

"""Commands that run a trained model: generate, score, pack, serve."""

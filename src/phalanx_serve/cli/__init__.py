"""The commands that run a trained model: text, scores, a service."""

"""Origin of tokens, and the steps that read them: for users, not for training."""

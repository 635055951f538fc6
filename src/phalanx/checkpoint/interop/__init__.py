"""Checkpoints in other software's formats: Hugging Face and torch.distributed.checkpoint."""

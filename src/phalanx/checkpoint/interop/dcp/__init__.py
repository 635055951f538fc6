"""Folders of ``torch.distributed.checkpoint``: export, and import without executing their content."""

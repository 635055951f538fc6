"""Checkpoints as folders of ``torch.distributed.checkpoint``: written, and read without running what they hold."""

"""Weights from Python: as a state dict, and as a hash."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.committed.digest import WEIGHTS, digest_checkpoint
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.boxes import whole
from phalanx.checkpoint.format.shards import Shard, torch_dtype
from phalanx.checkpoint.interop.huggingface.stored_folder import FolderTier
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.run.directory.paths import RunDirectoryError, committed_steps, is_published, locate_checkpoints


def load_weights(place: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """The weights of a checkpoint as a state dict: whole tensors on the CPU, in the format of the master weights (fp32).

    The names are those of the module: of a model of your own, ``model.load_state_dict(load_weights(...))`` takes them.

    Args:
        place: A run directory, its folder of checkpoints, one checkpoint, or a folder of Hugging Face.
        step: ``None``: the newest, or that of the one checkpoint.

    Raises:
        RunDirectoryError: There is no such checkpoint, or ``place`` is that of another step.
        CheckpointError: It is damaged.
    """
    tier, step = _checkpoint(place, step)
    boxes = {held.box.name: held.box for held in tier.boxes(step) if held.box.name.startswith(WEIGHTS)}
    shards = [
        Shard(
            whole(name, box.dtype, box.global_shape),
            torch.empty(box.global_shape, dtype=torch_dtype(box.dtype)),
        )
        for name, box in sorted(boxes.items())
    ]
    restore(tier, step, shards)
    return {shard.box.name.removeprefix(WEIGHTS): shard.tensor for shard in shards}


def weights_sha256(place: Path | str, step: int | None = None) -> str:
    """SHA-256 (hex) over all weights of a checkpoint, from the bytes on disk: the hash that training reports.

    ``place`` and ``step`` are as for ``load_weights``.
    """
    tier, step = _checkpoint(place, step)
    return digest_checkpoint(tier, step)


def _checkpoint(place: Path | str, step: int | None) -> tuple[ReadableTier, int]:
    if is_published(Path(place)):
        return FolderTier(Path(place)), step or 0
    root, wanted = locate_checkpoints(Path(place), step)
    steps = committed_steps(root) if root.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"there is no committed checkpoint in {place}")
    if wanted is not None and wanted not in steps:
        raise RunDirectoryError(f"there is no step {wanted} in {place}; there are {steps}")
    return DiskTier(root), steps[-1] if wanted is None else wanted

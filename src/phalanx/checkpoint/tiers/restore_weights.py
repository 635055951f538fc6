"""Restores the weights alone: what reads a finished model needs nothing else of a checkpoint."""

from __future__ import annotations

import logging

from torch import nn

from phalanx.checkpoint.format.boxes import whole
from phalanx.checkpoint.format.errors import CorruptError, MissingFileError, NoSuchStepError, StorageError
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.tiers.digest import WEIGHTS
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.restore import candidates, restore
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

_log = logging.getLogger(__name__)


def restore_weights(directory: RunDirectory, model: nn.Module, step: int | None = None) -> int:
    """Fills a whole ``model`` with the weights of ``step``, or of the newest step that can be read, and returns the step.

    Without ``step``, a damaged checkpoint is passed over with a warning. Raises RunDirectoryError where the run has no checkpoint,
    NoSuchStepError, and what ``restore`` raises.
    """
    if not directory.checkpoints.is_dir():
        raise RunDirectoryError(
            f"{directory.path}: has no folder checkpoints; give the directory of a run that saved"
        )
    tier = DiskTier(directory.checkpoints)
    if step is not None:
        return _restore_step(tier, step, model)
    steps = candidates(tier)
    if not steps:
        raise RunDirectoryError(f"{tier.root}: no checkpoint is committed; let the run save one first")
    for one in steps:
        try:
            return _restore_step(tier, one, model)
        except (CorruptError, MissingFileError, StorageError, NoSuchStepError) as error:
            _log.warning("step %d cannot be read and is passed over: %s", one, error)
    raise RunDirectoryError(f"{tier.root}: none of the steps {steps} can be read; see the warnings above")


def _restore_step(tier: DiskTier, step: int, model: nn.Module) -> int:
    # The boxes say what is held, fp32; copying into the model's own tensors converts and moves to its device.
    shards = [
        Shard(whole(WEIGHTS + name, "float32", tuple(tensor.shape)), tensor)
        for name, tensor in model.state_dict().items()
    ]
    restore(tier, step, shards)
    return step

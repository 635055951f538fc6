"""Restores the weights alone: what reads a finished model needs nothing else of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from phalanx.checkpoint.committed.digest import WEIGHTS
from phalanx.checkpoint.committed.restore import candidates, restore
from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.errors import CorruptError, MissingFileError, NoSuchStepError, StorageError
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.run.directory.paths import RunDirectoryError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Where a part of a tensor lies that has some of its rows: neighbors along the first dimension."""

    first: int
    of: int
    """Rows of the whole tensor."""


def restore_weights(
    tier: ReadableTier,
    place: Path,
    model: nn.Module,
    step: int | None = None,
    parts: Mapping[str, Rows] | None = None,
) -> int:
    """Fills a ``model`` with the weights of ``step``, or of the newest step that can be read, and returns the step.

    The tensors named in ``parts`` are parts of the checkpoint's, all others whole. Without ``step``, a damaged checkpoint is passed over with a warning. ``place`` is what messages call the run. Raises RunDirectoryError where the run has no checkpoint,
    NoSuchStepError, and what ``restore`` raises.
    """
    if step is not None:
        return _restore_step(tier, step, model, parts or {})
    steps = candidates(tier)
    if not steps:
        raise RunDirectoryError(f"{place}: no checkpoint is committed; let the run save one first")
    for one in steps:
        try:
            return _restore_step(tier, one, model, parts or {})
        except (CorruptError, MissingFileError, StorageError, NoSuchStepError) as error:
            _log.warning("step %d cannot be read and is passed over: %s", one, error)
    raise RunDirectoryError(f"{place}: none of the steps {steps} can be read; see the warnings above")


def _restore_step(tier: ReadableTier, step: int, model: nn.Module, parts: Mapping[str, Rows]) -> int:
    # The boxes say what is held, fp32; copying into the model's own tensors converts and moves to its device.
    shards = [
        Shard(_box(WEIGHTS + name, tuple(tensor.shape), parts.get(name)), tensor)
        for name, tensor in model.state_dict().items()
    ]
    restore(tier, step, shards)
    return step


def _box(name: str, shape: Extent, part: Rows | None) -> Box:
    if part is None:
        return whole(name, "float32", shape)
    return whole(name, "float32", (part.of, *shape[1:])).rows(part.first, part.first + shape[0])

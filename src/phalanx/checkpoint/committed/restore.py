"""Restore a rank's tensors, or the weights alone, from a checkpoint of any layout (resharding)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import nn

from phalanx.checkpoint.committed.digest import WEIGHTS
from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.errors import (
    CorruptError,
    MismatchError,
    MissingFileError,
    NoSuchStepError,
    NotCoveredError,
    StorageError,
)
from phalanx.checkpoint.format.image import RawArray
from phalanx.checkpoint.format.restore_plan import Held, PlannedRead, plan_restore
from phalanx.checkpoint.format.shards import Shard, torch_dtype
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.run.directory.paths import RunDirectoryError

_RAW_TORCH = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_log = logging.getLogger(__name__)


def candidates(tier: ReadableTier) -> list[int]:
    """The steps that can be restored, newest first."""
    return sorted(tier.steps(), reverse=True)


def restore(
    tier: ReadableTier | Sequence[ReadableTier],
    step: int,
    shards: Sequence[Shard],
    *,
    rank: int | None = None,
    reader: int | None = None,
    may_be_missing: Collection[str] = (),
) -> dict[str, object]:
    """Fills ``shards`` in place with the elements of committed ``step``, and returns the step's ``extra``.

    Of several tiers, each element comes from the nearest that holds it. With ``rank``, what was saved as that rank
    is looked at first, so that a restart on the same layout reads no other rank's. ``reader`` (else ``rank``) is the number of
    this reader among all, so that not all take the same one of equally near holders. Every tensor must be
    held in full, but those in ``may_be_missing``, which stay as they are where the checkpoint has nothing of them.
    Tensors of the checkpoint that no shard asks for are not read.

    Raises NotCoveredError and MismatchError before anything is changed; CorruptError, MissingFileError or
    StorageError may leave shards half filled: restore another step or from another tier then.
    """
    tiers = list(tier) if isinstance(tier, Sequence) else [tier]
    present = [one for one in tiers if one.has(step)] or tiers
    needed = [shard.box for shard in shards]
    reads = _plan(present, step, needed, rank, rank if reader is None else reader, frozenset(may_be_missing))
    targets: dict[str, list[Shard]] = {}
    for shard in shards:
        targets.setdefault(shard.box.name, []).append(shard)
    by_name = {one.name: one for one in present}
    for name, group in groupby(reads, key=lambda read: read.source.location.tier):
        for piece, data in by_name[name].read(step, list(group)):
            _fill(targets[piece.name], piece, data)
    return present[0].extra(step)


def _plan(
    tiers: Sequence[ReadableTier],
    step: int,
    needed: Sequence[Box],
    rank: int | None,
    reader: int | None,
    may_be_missing: frozenset[str],
) -> tuple[PlannedRead, ...]:
    if rank is not None:
        try:
            return plan_restore(needed, _held(tiers, step, rank, needed), reader=reader or 0)
        except (NotCoveredError, MismatchError):
            _log.info("step %d was saved on another layout than this one; looking at all ranks' shares", step)
    held = _held(tiers, step, None, needed)
    if may_be_missing:
        present = {entry.box.name for entry in held}
        needed = [box for box in needed if box.name in present or box.name not in may_be_missing]
    return plan_restore(needed, held, reader=reader or 0)


def _held(tiers: Sequence[ReadableTier], step: int, rank: int | None, needed: Sequence[Box]) -> list[Held]:
    return [held for tier in tiers for held in tier.boxes(step, rank, needed)]


def _fill(shards: Sequence[Shard], piece: Box, data: RawArray) -> None:
    for shard in shards:
        common = piece.intersection(shard.box)
        if common is None:
            continue
        target = shard.tensor.detach()[common.slices_in(shard.box)]
        if not data.flags.writeable and target.device.type == "cpu":
            # PyTorch takes no read-only memory.
            np.copyto(target.view(_RAW_TORCH[data.itemsize]).numpy(), data[common.slices_in(piece)])
            continue
        source = torch.from_numpy(data if data.flags.writeable else data.copy())
        target.copy_(source.view(torch_dtype(piece.dtype))[common.slices_in(piece)])


# Restore of the weights alone: a reader of a finished model needs nothing else of a checkpoint.


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

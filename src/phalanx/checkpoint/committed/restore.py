"""A rank's shards, and their restoration, or that of the weights alone, from a checkpoint of any layout (resharding)."""

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
from phalanx.checkpoint.format.boxes import Box, Extent, PlannedRead, StoredBox, full_box, plan_restore
from phalanx.checkpoint.format.errors import (
    CorruptError,
    MismatchError,
    MissingFileError,
    NoSuchStepError,
    NotCoveredError,
    StorageError,
)
from phalanx.checkpoint.format.image import RawArray
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.run.directory.paths import RunDirectoryError

# Shards: a rank's boxes with their tensors, and the other ranks that have the same boxes.
#
# Training makes them from its parameters and optimizer state (``train/step/state.py``).


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks with the same box: this is copy ``index`` of ``count``; ``group`` distinguishes sets of ranks."""

    index: int = 0
    count: int = 1
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A box and the tensor with its elements, of the box's shape and dtype, on any device."""

    box: Box
    tensor: torch.Tensor
    copies: Copies = Copies()

    def part(self, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, which is within this shard, as a view."""
        return self.tensor if box == self.box else self.tensor[box.slices_in(self.box)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of ``dtype_name``, for the dtypes of ``boxes.ITEMSIZE``. Raises AttributeError or TypeError for another name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a torch dtype")
    return dtype


_RAW_TORCH = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_log = logging.getLogger(__name__)


def candidates(tier: ReadableTier) -> list[int]:
    """Return the steps that can be restored, newest first."""
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
    """Fill ``shards`` in place with the elements of committed ``step``, and return the step's ``extra``.

    With several tiers, each element is read from the nearest that has it. With ``rank``, the boxes saved as that rank are tried first, so
    that a restart on the same layout reads no other rank's. ``reader`` (else ``rank``) is the index of this reader among all. It spreads
    readers over equally near holders. Every tensor must be covered completely, except those in ``may_be_missing``, which are unchanged if
    the checkpoint lacks them. Tensors of the checkpoint without a shard are not read.

    Raises NoSuchStepError if no tier has the step. It, NotCoveredError and MismatchError are raised before anything is changed.
    CorruptError, MissingFileError and StorageError may leave shards partly filled: then restore another step, or from another tier.
    """
    tiers = list(tier) if isinstance(tier, Sequence) else [tier]
    present = [tier for tier in tiers if tier.has(step)] or tiers
    needed = [shard.box for shard in shards]
    reads = _plan(present, step, needed, rank, rank if reader is None else reader, frozenset(may_be_missing))
    targets: dict[str, list[Shard]] = {}
    for shard in shards:
        targets.setdefault(shard.box.name, []).append(shard)
    by_name = {tier.name: tier for tier in present}
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
    """Return the reads for ``needed``: from the boxes of ``rank`` if these cover it, else from all ranks' (logged).

    With ``rank`` None, from all ranks'. Tensors in ``may_be_missing`` that no tier has are left out.
    """
    if rank is not None:
        try:
            return plan_restore(needed, _stored_boxes(tiers, step, rank, needed), reader=reader or 0)
        except (NotCoveredError, MismatchError):
            _log.info("step %d was saved on another layout than this one; reading all ranks' shares", step)
    stored = _stored_boxes(tiers, step, None, needed)
    if may_be_missing:
        present = {entry.box.name for entry in stored}
        needed = [box for box in needed if box.name in present or box.name not in may_be_missing]
    return plan_restore(needed, stored, reader=reader or 0)


def _stored_boxes(
    tiers: Sequence[ReadableTier], step: int, rank: int | None, needed: Sequence[Box]
) -> list[StoredBox]:
    return [box for tier in tiers for box in tier.boxes(step, rank, needed)]


def _fill(shards: Sequence[Shard], piece: Box, data: RawArray) -> None:
    """Copy ``data``, the elements of ``piece`` as raw integers, into each shard that overlaps it, converting to its dtype and device."""
    dtype = torch_dtype(piece.dtype)
    for shard in shards:
        common = piece.intersection(shard.box)
        if common is None:
            continue
        target = shard.tensor.detach()[common.slices_in(shard.box)]
        if not data.flags.writeable and target.device.type == "cpu" and target.dtype == dtype:
            # PyTorch does not support read-only memory, and equal dtypes need no copy of it.
            np.copyto(target.view(_RAW_TORCH[data.itemsize]).numpy(), data[common.slices_in(piece)])
            continue
        source = torch.from_numpy(data if data.flags.writeable else data.copy())
        target.copy_(source.view(dtype)[common.slices_in(piece)])


# Restore of the weights alone, for readers of a finished model.


@dataclass(frozen=True)
class Rows:
    """Position of a part of a tensor that has some of its rows: neighbors along the first dimension."""

    first: int
    of: int
    """Number of rows of the full tensor."""


def restore_weights(
    tier: ReadableTier,
    place: Path,
    model: nn.Module,
    step: int | None = None,
    parts: Mapping[str, Rows] | None = None,
) -> int:
    """Fill a ``model`` with the weights of ``step``, or of the newest readable step, and return the step.

    The tensors in ``parts`` are parts of the checkpoint's, all others are complete. Without ``step``, a step that
    cannot be read is skipped with a warning. ``place`` names the run in messages. Raises RunDirectoryError if the run
    has no checkpoint, or none that can be read; NoSuchStepError for ``step``; and the errors of ``restore``.
    """
    if step is not None:
        return _restore_step(tier, step, model, parts or {})
    steps = candidates(tier)
    if not steps:
        raise RunDirectoryError(f"{place}: no checkpoint is committed; let the run save one first")
    for candidate in steps:
        try:
            return _restore_step(tier, candidate, model, parts or {})
        except (CorruptError, MissingFileError, StorageError, NoSuchStepError) as error:
            _log.warning("step %d cannot be read and is skipped: %s", candidate, error)
    raise RunDirectoryError(f"{place}: none of the steps {steps} can be read; see the warnings above")


def _restore_step(tier: ReadableTier, step: int, model: nn.Module, parts: Mapping[str, Rows]) -> int:
    """Restore a step's weights into the model's state dict, of the tensors in ``parts`` only those rows. Return the
    step. Raises as ``restore`` does.
    """
    # The boxes are fp32, as stored; copying into the model's tensors converts and moves them to its device.
    shards = [
        Shard(_box(WEIGHTS + name, tuple(tensor.shape), parts.get(name)), tensor)
        for name, tensor in model.state_dict().items()
    ]
    restore(tier, step, shards)
    return step


def _box(name: str, shape: Extent, part: Rows | None) -> Box:
    """Return the box of a tensor: all of it, or its rows of the full one."""
    if part is None:
        return full_box(name, "float32", shape)
    return full_box(name, "float32", (part.of, *shape[1:])).rows(part.first, part.first + shape[0])

"""Begins a run from a checkpoint of another one, on all ranks together, and records the run's lineage.

What is taken over is the run file's word, ``checkpoint.init_with``: the weights, the optimizer's state with them, or all of the
training. The checkpoint is read where it is; nothing of it is copied. From the run's first checkpoint of its own, it is needed no
longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.checkpoint.tiers.origin import open_origin
from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.lineage import Origin, lineage_table, read_lineage
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import CheckpointSpec
from phalanx.store.open_store import is_url
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.step.built import Built
from phalanx.train.step.state import RestoredState, weight_shards
from phalanx.train.step.weights_hash import weights_sha256


def take_over(
    checkpoint: CheckpointSpec,
    directory: RunDirectory,
    built: Built,
    shards: Sequence[Shard],
    *,
    alone: bool = False,
) -> RestoredState | None:
    """Fills this rank's shards from ``checkpoint.init_from``; ``None`` if the training itself begins anew. A collective call.

    Args:
        checkpoint: Says what is taken over, from which checkpoint.
        directory: The run's own, in whose record the origin is noted.
        built: The model, and how it is divided.
        shards: This rank's shards of weights and optimizer state.
        alone: Each rank has a machine of its own, so that what is fetched is not shared.

    Raises:
        CheckpointError: The checkpoint is gone or damaged, or holds another model or another optimizer's state.
    """
    began_s = time.monotonic()
    start = checkpoint.init_from
    tier, step = open_origin(start)
    if not tier.has(step):
        raise NoSuchStepError(
            f"{start} is gone: the run has saved no checkpoint of its own yet, so it needs that one to begin from"
        )
    parts, placement = built.model.parts, built.placement
    wanted = weight_shards(parts, placement) if checkpoint.init_with == "weights" else shards
    with _shared_by_ranks(tier, alone):
        extra = restore(tier, step, wanted, rank=placement.mesh.rank)
        dist.barrier()
    weights = tier.record(step).weights_sha256 or weights_sha256(parts, placement)
    if placement.mesh.rank == 0:
        _record(directory, start, step, weights, checkpoint.init_with)
    if checkpoint.init_with == "weights":
        return None
    if checkpoint.init_with == "optimizer":
        # Adam's bias correction goes by the updates that its moments have seen; all else begins anew.
        extra = asdict(TrainProgress(updates=TrainProgress.from_extra(extra).updates))
    progress = TrainProgress.from_extra(extra)
    seconds = time.monotonic() - began_s
    return RestoredState(progress.step, extra, (), start, seconds, taken_over=True)


def _shared_by_ranks(tier: DiskTier | ObjectTier, alone: bool) -> AbstractContextManager[None]:
    return tier.shared_on_this_machine() if isinstance(tier, ObjectTier) and not alone else nullcontext()


def _record(directory: RunDirectory, start: str, step: int, weights: str, init_with: str) -> None:
    """Notes the origin in the run's record, after the parent's own origins, which a store does not tell."""
    if is_url(start):
        place, above = start.rpartition("/")[0], dict[str, Any]()
    else:
        parent = RunDirectory(Path(start).parent.parent)
        place, above = str(parent.path), parent.read_record()
    origin = Origin(place, str(above.get("identity", "")), step, weights, init_with)
    record = {
        **directory.read_record(),
        "lineage": lineage_table([*read_lineage(above), origin]),
    }
    write_atomically(directory.record, (json.dumps(record, indent=1) + "\n").encode())

"""A run's state as named tensors: initialization, and restore from a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint.committed.digest import OPTIMIZER
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.tiers.tier import KeepingTier
from phalanx.model.init import fill
from phalanx.model.layers.experts.router import routers
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.process_group.typed_gather import broadcast_typed, gather_typed
from phalanx.parallel.reduction.data_parallel import local, named_parameters
from phalanx.run.spec import RunSpec
from phalanx.train.optimizers.optimizer import Optimizer
from phalanx.train.step.placement import Placement

_log = logging.getLogger(__name__)


class NoGoodCheckpointError(RuntimeError):
    """There are checkpoints, but none can be restored."""


@dataclass(frozen=True)
class RestoredState:
    """The state that was restored, and the damaged checkpoints that were passed over."""

    step: int
    extra: dict[str, object]
    passed_over: tuple[str, ...]
    source: str
    """The source, for people; empty means the run's checkpoints."""
    seconds: float
    """The time that it took on this rank."""
    moved_bytes: int = 0
    """Bytes that all ranks together fetched from other nodes' memory."""
    taken_over: bool = False
    """True if it is the state of another run, from which this one begins."""


def state_tensors(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """This rank's part of the model's state dict: parameters, and the biases that balance experts."""
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in named_parameters(parts).items()}
    for part in parts:
        tensors |= {f"{name}.bias": r.bias for name, r in routers(part) if r.bias is not None}
    return tensors


def fill_initial(parts: Sequence[nn.Module], placement: Placement, spec: RunSpec) -> None:
    """Fills this rank's part of every parameter with its initial values."""
    for name, tensor in state_tensors(parts).items():
        offset, _ = placement.partition(name).local_slice(tensor)
        fill(local(tensor), placement.kinds[name], offset, spec.model, spec.runtime.seed)


def weight_shards(parts: Sequence[nn.Module], placement: Placement) -> list[Shard]:
    """This rank's shards of the weights, named as in a checkpoint."""
    return [placement.shard("model", name, tensor) for name, tensor in state_tensors(parts).items()]


def state_shards(parts: Sequence[nn.Module], optimizer: Optimizer, placement: Placement) -> list[Shard]:
    """This rank's shards of weights and optimizer state, named as in a checkpoint."""
    return [
        *weight_shards(parts, placement),
        *(
            placement.state_shard(f"{OPTIMIZER}{name}", part)
            for name, held in optimizer.state().items()
            for part in held
        ),
    ]


def restore_newest(
    tiers: Sequence[KeepingTier], shards: Sequence[Shard], mesh: Mesh, *, up_to: int | None = None
) -> RestoredState | None:
    """Fills ``shards`` from the newest checkpoint that every rank can read in full; ``None`` if there is none.

    Of several ``tiers``, the first is the run's own disk, and of one step its copy there is tried first. Checkpoints after step ``up_to`` are
    ignored. If any rank finds its part torn or corrupted, all ranks turn to the next copy, or the next older step, together. Raises
    ``NoGoodCheckpointError`` when none is left.
    """
    began_s = time.monotonic()
    passed_over: list[str] = []
    damaged: list[tuple[KeepingTier, int]] = []
    by_name = {tier.name: tier for tier in tiers}
    for step, name in _agreed_candidates(tiers, mesh, up_to):
        error = ""
        extra: dict[str, object] = {}
        try:
            extra = restore(by_name[name], step, shards, rank=mesh.rank)
        except CheckpointError as problem:
            error = str(problem)
        errors = gather_typed(error, str)
        if not any(errors):
            if mesh.rank == 0:
                # Training will reach these steps again and save them again.
                for tier, bad in damaged:
                    tier.set_aside(bad)
            dist.barrier()
            source = "" if name == tiers[0].name else name
            return RestoredState(step, extra, tuple(passed_over), source, time.monotonic() - began_s)
        damaged.append((by_name[name], step))
        passed_over += sorted({f"step {step}: {text}" for text in errors if text})
    if passed_over:
        raise NoGoodCheckpointError(
            "no checkpoint can be restored; remove the damaged ones to start from scratch:\n"
            + "\n".join(f"  {line}" for line in passed_over)
        )
    return None


def _agreed_candidates(
    tiers: Sequence[KeepingTier], mesh: Mesh, up_to: int | None
) -> Iterator[tuple[int, str]]:
    """The steps to try, newest first, each with the name of the tier that has it, as rank 0 lists them: a shared file system may show them
    to other ranks a moment later.

    If the disk has ``up_to``, nothing can be newer: a store, which may not answer for minutes, is looked at only when that fails.
    """
    disk = tiers[0]
    tried = up_to is not None and broadcast_typed(mesh.rank == 0 and up_to in disk.steps(), bool)
    if up_to is not None and tried:
        yield up_to, disk.name
    found: list[tuple[int, str]] = []
    if mesh.rank == 0:
        copies = [
            (step, -place, tier.name) for place, tier in enumerate(tiers) for step in _steps(tier, tiers)
        ]
        found = [
            (step, name)
            for step, _, name in sorted(copies, reverse=True)
            if (up_to is None or step <= up_to) and not (tried and (step, name) == (up_to, disk.name))
        ]
    yield from broadcast_typed(found, list[tuple[int, str]])


def _steps(tier: KeepingTier, tiers: Sequence[KeepingTier]) -> list[int]:
    try:
        return tier.steps()
    except CheckpointError as error:
        if tier is tiers[0] or not tiers[0].steps():
            raise
        _log.warning("%s; going on with the checkpoints on disk", error)
        return []

"""A run's state as named tensors: placement on ranks, initialization, restore from a checkpoint, and the hash of the weights.

The tensor, expert and pipeline axes divide the model's parameters before FSDP does (``phalanx.parallel.mesh``). ``Placement``
combines both: this rank's part of each tensor, and the ranks that have the same part. Code that works on full tensors reads
it: initial values, checkpoints, the hash of the weights and the norm of the gradient.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint.committed.digest import OPTIMIZER, WEIGHTS, TensorDigest, combine
from phalanx.checkpoint.committed.restore import Copies, Shard, dtype_name, restore
from phalanx.checkpoint.format.boxes import Box, full_box
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.image import spans
from phalanx.checkpoint.tiers.tier import KeepingTier
from phalanx.hardware.local.device import CommClock
from phalanx.model.init import fill
from phalanx.model.layers.moe import routers
from phalanx.observe.ledger import Bucket
from phalanx.parallel.divisions import Round
from phalanx.parallel.mesh import Mesh, Partition
from phalanx.parallel.process_group.typed_gather import broadcast_typed, gather_typed
from phalanx.parallel.reduction.data_parallel import DataParallel, local, named_parameters
from phalanx.parallel.torch_compat import device_of_messages
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import RunSpec
from phalanx.train.optimizers.optimizer import Optimizer, StatePart
from phalanx.train.precision import apply_precision
from phalanx.train.step.slot import SlotRunner


@dataclass(frozen=True)
class Placement:
    """This rank's parts of the model's parameters."""

    mesh: Mesh
    kinds: Mapping[str, Parameter]
    """Every parameter and balance bias of the whole model, in the canonical order."""
    partitions: Mapping[str, Partition]
    """The division of those parameters of this rank that the tensor and expert axes divide or copy."""

    @property
    def parameter_count(self) -> int:
        """Number of elements of the whole model's parameters."""
        return sum(kind.numel for kind in self.kinds.values() if kind.kind != "balance")

    @property
    def routers(self) -> list[str]:
        """The names of all routers of the whole model, in the order of layers."""
        return [name.removesuffix(".weight") for name, kind in self.kinds.items() if kind.kind == "router"]

    def partition(self, name: str) -> Partition:
        """Return the division of a parameter before FSDP divides it."""
        return self.partitions.get(name) or Partition(self.kinds[name].shape)

    def owns(self, name: str) -> bool:
        """Return True on exactly one of the ranks with the same part of a parameter: the one that counts in sums over ranks."""
        return self.mesh.rank == self.holders(name)[0]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks with the same part of a parameter as this rank, itself included, ascending."""
        kind = self.kinds[name]
        if kind.stacked:
            return self._holders_of_experts
        if kind.kind == "balance":
            return self._holders_of_biases
        return self._holders_by_copies[self.partition(name).copies]

    # The lists may be as long as the fleet, so they are computed once for all parameters.

    @cached_property
    def _holders_of_experts(self) -> tuple[int, ...]:
        place = self.mesh.expert_mesh.get_coordinate()
        assert place is not None, "every rank has a place"
        return _ascending(self.mesh.expert_mesh.mesh[place[0], :, place[2], place[3], place[4]])

    @cached_property
    def _holders_of_biases(self) -> tuple[int, ...]:
        return _ascending(self.mesh.dense.mesh[self.mesh.pipeline_rank])

    @cached_property
    def _holders_by_copies(self) -> Mapping[int, tuple[int, ...]]:
        """Return the ranks with this rank's parts of dense parameters, by the number of tensor ranks that have the same part."""
        mesh = self.mesh
        holders = {}
        for copies in {1, *(partition.copies for partition in self.partitions.values())}:
            first = mesh.tensor_rank // copies * copies
            holders[copies] = _ascending(
                mesh.dense.mesh[mesh.pipeline_rank, :, mesh.fsdp_rank, first : first + copies]
            )
        return holders

    def shard(self, prefix: str, name: str, tensor: Tensor) -> Shard:
        """Return this rank's shard, for a checkpoint as ``PREFIX/NAME``, of a tensor that is divided like parameter
        ``name``. The data are not copied; an empty part has offset 0.
        """
        partition = self.partition(name)
        offset, shape = partition.local_slice(tensor)
        if 0 in shape:
            offset = (0,) * len(shape)
        holders = self.holders(name)
        box = Box(f"{prefix}/{name}", dtype_name(tensor.dtype), partition.full_shape, offset, shape)
        return Shard(
            box, local(tensor.detach()), Copies(holders.index(self.mesh.rank), len(holders), holders)
        )

    def state_shard(self, name: str, part: StatePart) -> Shard:
        """Return this rank's shard, for a checkpoint, of a part of the optimizer's state. It is held like the
        parameter ``part.like``; without that, by the same rank of each replica.
        """
        shape = tuple(part.tensor.shape)
        offset = (0,) * len(shape) if 0 in shape else part.offset
        mesh = self.mesh.stage_mesh
        alone = mesh.mesh[self.mesh.pipeline_rank, :, mesh.get_local_rank("stage")]
        holders = self.holders(part.like) if part.like else tuple(int(rank) for rank in alone.tolist())
        return Shard(
            Box(name, dtype_name(part.tensor.dtype), part.full_shape, offset, shape),
            part.tensor,
            Copies(holders.index(self.mesh.rank), len(holders), holders),
        )


def _ascending(ranks: Tensor) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in ranks.flatten().tolist()))  # (ranks,)


# A rank's model, with everything that its steps need.


@dataclass(frozen=True)
class Built:
    """A model on one rank, with memory allocated but not yet filled."""

    spec: RunSpec
    """The resolved run."""
    model: DataParallel
    placement: Placement
    """Positions of this rank's parts in the full tensors."""
    runner: SlotRunner
    """Forward and backward of a slot, with or without a pipeline."""
    optimizer: Optimizer
    rounds: list[Round]
    """Rounds of a step, in order, each with the slot of this rank."""
    waits: Mapping[Bucket, CommClock]
    """Stopwatch per communication axis: exposed communication time of forward and backward, by ledger bucket."""
    flops_per_token: int
    """Training FLOP per token of the whole model."""

    def set_wide(self, *, wide: bool) -> None:
        """Compute the products of the next steps in ``precision.compute`` if ``wide``, else in ``precision.matmul``."""
        for part in self.model.parts:
            apply_precision(part, self.spec, wide=wide)

    def optimizer_tensors(self) -> list[Tensor]:
        """Return this rank's tensors of the optimizer's state."""
        return [part.tensor for parts in self.optimizer.state().values() for part in parts]

    def forget_waits(self) -> None:
        """Discard the waits measured since the last step: gathering weights and waiting for stages there was no step's."""
        for clock in self.waits.values():
            clock.forget()


_log = logging.getLogger(__name__)


class NoGoodCheckpointError(RuntimeError):
    """There are checkpoints, but none can be restored."""


@dataclass(frozen=True)
class RestoredState:
    """The restored state, and the damaged checkpoints that were skipped."""

    step: int
    extra: dict[str, object]
    passed_over: tuple[str, ...]
    source: str
    """The source, for messages; empty means the run's checkpoints."""
    seconds: float
    """Duration of the restore on this rank."""
    moved_bytes: int = 0
    """Bytes that all ranks fetched from other nodes' memory."""
    taken_over: bool = False
    """True if it is the state of the run from which this one was started."""


def state_tensors(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's part of the model's state dict: parameters, and the biases that balance experts."""
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in named_parameters(parts).items()}
    for part in parts:
        tensors |= {f"{name}.bias": r.bias for name, r in routers(part) if r.bias is not None}
    return tensors


def fill_initial(parts: Sequence[nn.Module], placement: Placement, spec: RunSpec) -> None:
    """Fill this rank's part of every parameter with its initial values."""
    for name, tensor in state_tensors(parts).items():
        offset, _ = placement.partition(name).local_slice(tensor)
        fill(local(tensor), placement.kinds[name], offset, spec.model, spec.runtime.seed)


def weight_shards(parts: Sequence[nn.Module], placement: Placement) -> list[Shard]:
    """Return this rank's shards of the weights, named as in a checkpoint."""
    return [placement.shard("model", name, tensor) for name, tensor in state_tensors(parts).items()]


def state_shards(parts: Sequence[nn.Module], optimizer: Optimizer, placement: Placement) -> list[Shard]:
    """Return this rank's shards of weights and optimizer state, named as in a checkpoint."""
    return [
        *weight_shards(parts, placement),
        *(
            placement.state_shard(f"{OPTIMIZER}{name}", part)
            for name, state_parts in optimizer.state().items()
            for part in state_parts
        ),
    ]


def restore_newest(
    tiers: Sequence[KeepingTier], shards: Sequence[Shard], mesh: Mesh, *, up_to: int | None = None
) -> RestoredState | None:
    """Fill ``shards`` from the newest checkpoint that every rank can read in full. Return ``None`` if there is no
    checkpoint. A collective.

    The first of ``tiers`` is the run's own disk, whose copy of a step is tried first. Checkpoints after step
    ``up_to`` are ignored. If a rank's part is torn or corrupted, all ranks try the next copy, or the next older step;
    after a success, rank 0 sets damaged ones aside. Raises ``NoGoodCheckpointError`` if all are damaged.
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
    """Yield the steps to try, at most ``up_to`` unless that is None, newest first, each with the name of its tier; the
    same on all ranks. Rank 0 lists them, because a shared file system may show them to other ranks later.

    If the disk has ``up_to``, no other copy is newer, so the stores, which may not answer for minutes, are listed only
    if it is damaged.
    """
    disk = tiers[0]
    tried = up_to is not None and broadcast_typed(mesh.rank == 0 and up_to in disk.steps(), bool)
    if up_to is not None and tried:
        yield up_to, disk.name
    candidates: list[tuple[int, str]] = []
    if mesh.rank == 0:
        copies = [
            (step, -place, tier.name) for place, tier in enumerate(tiers) for step in _steps(tier, tiers)
        ]
        candidates = [
            (step, name)
            for step, _, name in sorted(copies, reverse=True)
            if (up_to is None or step <= up_to) and not (tried and (step, name) == (up_to, disk.name))
        ]
    yield from broadcast_typed(candidates, list[tuple[int, str]])


def _steps(tier: KeepingTier, tiers: Sequence[KeepingTier]) -> list[int]:
    """Return the steps of ``tier``. If a store cannot be listed while the disk, the first of ``tiers``, has
    checkpoints, log it and return none. Raise ``CheckpointError`` if the disk cannot be listed, or a store while the
    disk has none.
    """
    try:
        return tier.steps()
    except CheckpointError as error:
        if tier is tiers[0] or not tiers[0].steps():
            raise
        _log.warning("%s; continuing with the checkpoints on disk", error)
        return []


# The hash of all weights of a model in training, the same on any mesh and from any checkpoint.
#
# A tensor's SHA-256 needs its elements in order (``phalanx.checkpoint.committed.digest``), and they are distributed over many
# ranks. One rank receives the tensor in pieces, so that no rank needs memory for all of it. For each piece, every rank writes
# its elements into zeros, and the bytes are summed: each element comes from one rank, and the other summands are zero. Replicas
# divide the tensors among them, and the ranks of a replica hash different tensors at the same time.


_PIECE_BYTES = 64 << 20


def weights_sha256(
    parts: Sequence[nn.Module], placement: Placement, *, piece_bytes: int = _PIECE_BYTES
) -> str:
    """Return the hash of all weights, as 64 hexadecimal digits, on every rank; the same for any layout. A collective
    of all ranks.

    A rank needs memory for three pieces of ``piece_bytes``. The first ranks of a replica send and receive about the
    model's bytes divided by the number of replicas.
    """
    mesh, group = placement.mesh, placement.mesh.stage_group
    ranks = dist.get_process_group_ranks(group)
    shards = weight_shards(parts, placement)
    members = set(ranks)
    writers = {shard.box.name: min(members.intersection(shard.copies.group)) for shard in shards}
    hashes: dict[Box, hashlib._Hash] = {}
    with ThreadPoolExecutor(1) as hashing:
        last: Future[None] | None = None
        for shard, box, hasher in _pieces(shards[mesh.replica :: mesh.replicas], ranks, piece_bytes):
            writes = writers[box.name] == mesh.rank
            piece = _laid_in(box, shard, device_of_messages(group), writes=writes)
            if len(ranks) > 1 and piece.numel():
                dist.reduce(piece, hasher, group=group)
            if hasher == mesh.rank:
                if last is not None:
                    last.result()
                digest = hashes.setdefault(shard.box, hashlib.sha256())
                last = hashing.submit(digest.update, piece.cpu().numpy().data)
    mine = {
        box.name.removeprefix(WEIGHTS): TensorDigest(box.dtype, box.global_shape, digest.digest())
        for box, digest in hashes.items()
    }
    gathered = gather_typed(mine, dict[str, TensorDigest])
    return combine({name: digest for part in gathered for name, digest in part.items()})


def _pieces(
    shards: Sequence[Shard], ranks: Sequence[int], piece_bytes: int
) -> Iterator[tuple[Shard, Box, int]]:
    """Yield each tensor's shard, piece and hashing rank, its pieces in order. As many tensors as ranks are interleaved, piece by piece."""
    for first in range(0, len(shards), len(ranks)):
        together = shards[first : first + len(ranks)]
        cut = []
        for shard, hasher in zip(together, ranks, strict=False):
            tensor = full_box(shard.box.name, shard.box.dtype, shard.box.global_shape)
            cut.append(
                [(shard, span.part, hasher) for span in spans(tensor, tensor, piece_bytes)]
                or [(shard, tensor, hasher)]
            )
        for one_each in zip_longest(*cut):
            yield from (piece for piece in one_each if piece is not None)


def _laid_in(piece: Box, shard: Shard, device: torch.device, *, writes: bool) -> Tensor:
    """Return the bytes of ``piece`` of a full tensor on ``device``, ``(bytes,)`` uint8: this rank's elements if it
    ``writes``, and zeros elsewhere.
    """
    laid = torch.zeros(piece.shape, dtype=shard.tensor.dtype, device=device)
    common = shard.box.intersection(piece) if writes else None
    if common is not None:
        laid[common.slices_in(piece)] = shard.part(common).to(device)
    return laid.reshape(-1).view(torch.uint8)  # (bytes of the piece,)

"""Dry run: one rank of a large fleet is built and stepped in a single process, with the trainer's own code.

A *fake* process group, whose collectives return at once, makes a process rank 40,000 of 98,304. The
trainer's own code then builds the real meshes and, on the meta device, the real modules; what they hold is compared with
``phalanx.model.facts.holdings``. For the collectives a model of the same layers, layout and schedule, but of tiny width, takes one
real optimizer step, and everything that it calls is counted and compared with ``phalanx.parallel.collectives``.

A slot of the counted step has as few micro-batches as its schedule allows, and a rank has one slot: what a step calls is
proportional to both, or is called once. Activations are not recomputed, and the optimizer is AdamW.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from phalanx.model.autograd import DispatchMode
from phalanx.model.facts.holdings import holding, place_of
from phalanx.model.facts.shape import stage_layers
from phalanx.observe.ledger import Bucket, Ledger
from phalanx.parallel.collectives import Calls, collectives
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.reduction.data_parallel import local, named_parameters, spread
from phalanx.parallel.torch_compat import group_of, join_fake
from phalanx.run.kinds.whole_model import tiny as tiny_model
from phalanx.run.layout import SPLIT_BACKWARD, layout_of, micro_batches_per_slot
from phalanx.run.spec import MemorySpec, OptimizerSpec, PrecisionSpec, RunSpec, RuntimeSpec
from phalanx.train.compose import build_model, clocks, divided_parts
from phalanx.train.step.state import fill_initial
from phalanx.train.step.step import Stepper

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison
    from torch._ops import OpOverload

_Key = TypeVar("_Key", bound="SupportsRichComparison")
_DEVICE = torch.device("cpu")
_KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
}
"""The kind of collective of each operation of ``c10d`` and ``_c10d_functional``."""

_SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations that send nothing to other ranks."""


@dataclass(frozen=True)
class Comparison:
    """The figures of one rank: as derived by closed forms, and as found."""

    rank: int
    stages: tuple[int, ...]
    elements: dict[str, tuple[int, int]]
    """Elements of each parameter: by the closed form, and in the module."""
    calls: dict[tuple[str, str], tuple[int, int]]
    """Calls of each kind of collective: by the closed form, and counted."""

    @property
    def matches(self) -> bool:
        """True if all figures are equal."""
        pairs = (*self.elements.values(), *self.calls.values())
        return all(derived == measured for derived, measured in pairs)


def dry_run(spec: RunSpec, ranks: int, rank: int) -> Comparison:
    """Build and step rank ``rank`` of a resolved ``spec`` on ``ranks`` ranks, alone. Return derived beside counted
    elements of parameters, and, of a miniature of the run, collectives.

    A fake process group is set up and destroyed. Raises ``LayoutError`` if the run does not allow that number of
    ranks.
    """
    join_fake(rank, ranks)
    try:
        mesh = build_mesh(spec, ranks, _DEVICE)
        small = tiny(spec, ranks)
        expected = holding(spec, mesh.layout, place_of(mesh.layout, rank))
        narrow = holding(small, mesh.layout, place_of(mesh.layout, rank))
        derived = {piece.parameter.name: piece.elements for piece in expected.pieces}
        return Comparison(
            rank,
            expected.stages,
            _beside(derived, held_elements(spec, mesh)),
            _beside(collectives(small, mesh.layout, narrow), counted(small, mesh)),
        )
    finally:
        dist.destroy_process_group()


def _beside(derived: Mapping[_Key, int], measured: Mapping[_Key, int]) -> dict[_Key, tuple[int, int]]:
    return {key: (derived.get(key, 0), measured.get(key, 0)) for key in sorted({*derived, *measured})}


def held_elements(spec: RunSpec, mesh: Mesh) -> dict[str, int]:
    """Return the number of elements of each parameter in this rank's modules, by name. The modules are built on the
    meta device, so nothing is allocated.
    """
    spec = _plain(spec)
    waits = clocks(mesh.device)
    parts, _ = divided_parts(spec, mesh, waits, stage_layers(spec))
    nowhere = dataclasses.replace(mesh, device=torch.device("meta"))
    model = spread(parts, nowhere, spec, waits[Bucket.COMM_EXPOSED_DP])
    return {name: local(p).numel() for name, p in named_parameters(model.parts).items()}


def counted(spec: RunSpec, mesh: Mesh) -> Calls:
    """Run one optimizer step of a tiny ``spec`` on random tokens, and return the number of its collectives by axis and kind."""
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    stepper = Stepper(built, random_batches(spec), Ledger(time.monotonic_ns()))
    with _Counting(_axes(mesh)) as counting:
        report = stepper.run(1)
    assert report.applied, "nothing in a dry run is infinite"
    return counting.calls


def random_batches(spec: RunSpec) -> Iterator[NDArray[np.int64]]:
    """Yield random token ids ``(batch per slot, seq + 1)`` without end: speed and calls do not depend on their values."""
    random = np.random.default_rng(0)
    shape = spec.train.batch_size // spec.train.slots, spec.train.seq_len + 1
    while True:
        yield random.integers(0, spec.model.vocab_size, shape)


def tiny(spec: RunSpec, ranks: int, rounds: int = 1) -> RunSpec:
    """Return a miniature of a resolved ``spec`` that makes the same collectives on ``ranks`` ranks: the same layers,
    stages, lanes and loss chunks.

    It runs on a CPU with AdamW, tiny dimensions, one sequence a micro-batch, as few micro-batches as the schedule
    allows and at most ``rounds`` slots a rank. Of the precision only ``compute`` is kept. Dropped are offload,
    recomputation, compilation, asynchronous tensor parallelism and the ends of documents.
    """
    parallel, layout = spec.parallel, layout_of(spec.parallel, ranks)
    per_slot = min(micro_batches_per_slot(spec), _fewest(spec))
    slots = min(spec.train.slots, rounds * layout.data_ranks)
    tokens = (
        max(1, spec.train.micro_batch_size or spec.train.batch_size // spec.train.slots) * spec.train.seq_len
    )
    tiles = max(1, spec.model.context_tiles // layout.context)  # each has its own chunks of the loss
    chunks = -(-tokens // layout.context // tiles // spec.train.loss_chunk)
    pieces = max(1, spec.model.lanes) * max(1, spec.model.context_tiles)
    seq_len = 2 * max(layout.model_ranks, pieces) * chunks
    split = tuple(map(len, stage_layers(spec))) if parallel.pipeline > 1 else ()
    return dataclasses.replace(
        _plain(spec),
        model=tiny_model(spec.model, spec.model.lanes or layout.tensor),
        train=dataclasses.replace(
            spec.train,
            batch_size=slots * per_slot,
            micro_batch_size=1,
            slots=slots,
            seq_len=seq_len,
            loss_chunk=seq_len // layout.context // tiles // chunks,
            end_of_document=0,
        ),
        optimizer=OptimizerSpec(),
        precision=PrecisionSpec(compute=spec.precision.compute),
        parallel=dataclasses.replace(parallel, pipeline_split=split, async_tensor=False),
    )


def _plain(spec: RunSpec) -> RunSpec:
    """Return ``spec`` on a CPU with default ``memory`` and ``runtime`` and without asynchronous tensor parallelism.
    Dropped are offload, recomputation and compilation, which only change how operations are carried out.
    """
    return dataclasses.replace(
        spec,
        memory=MemorySpec(),
        runtime=RuntimeSpec(device="cpu"),
        parallel=dataclasses.replace(spec.parallel, async_tensor=False),
    )


def _fewest(spec: RunSpec) -> int:
    """Return the least number of micro-batches of a slot that the pipeline's schedule needs; two without a pipeline
    and for other schedules.
    """
    schedule, ranks = spec.parallel.pipeline_schedule, spec.parallel.pipeline
    if ranks == 1:
        return 2
    return {"interleaved": ranks, **dict.fromkeys(SPLIT_BACKWARD, 2 * ranks)}.get(schedule, 2)


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return the name of the axis of each process group, by the group's name; "all" for the world. Of groups with the
    same name, the later of the list counts.
    """
    groups = {
        "fsdp": mesh.dense.get_group("fsdp"),
        "replicate": mesh.replicate_group,
        "tensor": mesh.tensor_group,
        "context": mesh.context_group,
        "sequence": mesh.sequence_group,
        "expert_shard": mesh.expert_mesh.get_group("expert_shard"),
        "expert": mesh.expert_group,
        "expert_tensor": mesh.expert_tensor_group,
    }
    if mesh.key_group is not None:
        groups["key_copies"] = mesh.key_group
    names = {str(group.group_name): axis for axis, group in groups.items()}
    names |= {str(group.group_name): "pipeline" for group in mesh.pipeline_groups}
    names[str(mesh.expert_mesh.get_group("replicate").group_name)] = "replicate"
    assert dist.group.WORLD is not None
    return names | {str(dist.group.WORLD.group_name): "all"}


class _Counting(DispatchMode):
    """Count collectives, and give them results that a step can continue with: as if all ranks had what this one has."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.calls: Calls = Counter()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run ``func``. If it is a collective, count it by axis and kind, and fill its result, which the fake group
        leaves empty, with this rank's own input.

        Received messages become zeros. Sums over all ranks get one added, so that they are not empty.
        """
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace not in ("c10d", "_c10d_functional") or name in _SILENT:
            return result
        axis = self.axes[group_of(args)]
        self.calls[axis, _KINDS[name]] += 1
        if func.namespace == "c10d":
            # The result of a fake operation: zeros received, one added to a sum of all ranks, else the input repeated or cut off.
            if name == "recv_":
                args[0][0].zero_()
            elif name == "allreduce_":
                # As if another rank had added a one, so that sums over the fleet without a part of this rank are not zero.
                args[0][0].add_(int(axis == "all"))
            elif name != "send":
                _spread(args[1], args[0])
        elif isinstance(result, Tensor):
            _spread(args[0], result)
        return result


def _spread(input_: Tensor, result: Tensor) -> None:
    """Copy the elements of ``input_`` into ``result``: cut off if there are more, repeated if the sizes divide.
    Otherwise fill it with zeros.
    """
    source, target = input_.reshape(-1), result.reshape(-1)  # (elements,) each
    if target.numel() > source.numel() > 0 and target.numel() % source.numel() == 0:
        source = source.repeat(target.numel() // source.numel())
    result.copy_(
        source[: target.numel()].view_as(result)
        if source.numel() >= target.numel()
        else torch.zeros_like(result)
    )

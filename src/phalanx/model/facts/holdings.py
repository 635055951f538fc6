"""Parameters of each rank of a layout, and the owner ranks of full matrices, in closed form: no torch, nothing is built.

A parameter is divided in three steps:

1. The layers are divided over the stages of the pipeline.
2. Each matrix is divided over the tensor ranks, and the experts of a layer over the expert ranks.
3. FSDP divides the remaining part along its first dimension over the ranks that share it: ``ceil(rows / ranks)`` each, the last ones
   fewer or none.

``phalanx show --ranks`` prints these numbers; the dry run (``phalanx.train.measure.dry_run``) compares them with the modules that the
trainer builds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from phalanx.model.facts.optimizer_state import MatrixWork, adamw_state, matrix_work, takes_matrix
from phalanx.model.facts.shape import parameters, stage_layers
from phalanx.run.kinds.operations import HEAD_UNIT, Parameter
from phalanx.run.layout import SPLIT_BACKWARD, Layout, micro_batches_per_slot, stages_per_rank
from phalanx.run.spec import OptimizerSpec, ParallelSpec, RunSpec

# Complete sums of a rank that adds its own contiguous slots first (ZeRO-1): the number in memory at once, and the number
# exchanged.
#
# A rank's slots are a complete subtree only if their number is a power of two. Otherwise several nodes remain: of three slots,
# one is exchanged as a leaf.

_RANKS = 8
"""Ranks whose slots are looked at: those of more ranks are in the same places of their subtrees, or in better ones."""
_SUM_BYTES = 4


@cache
def held_bytes(slots: int, leaf_bytes: int) -> int:
    """Return the most bytes of partial sums, for each element, that any rank with ``slots`` slots keeps beside a
    slot's own gradient.

    ``leaf_bytes`` is the size of a slot's gradient that is not added yet; all sums have 4.
    """
    sizes = [0]
    for first in range(0, _RANKS * slots, slots):
        last = first + slots
        # The most nodes are there before a slot that completes many of them.
        moments = {(last >> level << level) - 1 for level in range(slots.bit_length())}
        sizes += [
            sum(_SUM_BYTES if level else leaf_bytes for level in _levels(first, moment))
            for moment in moments
            if moment > first
        ]
    return max(sizes)


@cache
def exchanged(slots: int) -> int:
    """Return the most whole sums that a rank of ``slots`` slots exchanges."""
    return max(len(list(_levels(first, first + slots))) for first in range(0, _RANKS * slots, slots))


def _levels(first: int, last: int) -> Iterator[int]:
    """Yield the level, 0 for a leaf, of each node that cannot be added further if only the leaves ``first`` up to
    ``last``, exclusive, are there.
    """
    level = 0
    while first < last:
        if first % 2:
            yield level
            first += 1
        if last % 2:
            yield level
            last -= 1
        first, last, level = first // 2, last // 2, level + 1


# Owner ranks of full matrices, for optimizers that cannot work on a shard.
#
# The matrices of one stage of one replica are assigned to its ranks (``phalanx.train.optimizers.matrix_optimizer`` moves the
# data). A matrix that is complete on a rank stays there: experts, because FSDP divides stacks by complete experts, and matrices that
# are replicated over tensor ranks. The others are assigned greedily, most expensive first, to the least loaded rank (Graham 1969).


def deal_matrices(
    costs: Sequence[float], whole_on: Sequence[Sequence[int]], loads: Sequence[float]
) -> list[int]:
    """Return the owner rank of each matrix: one that is complete on a rank stays there. Others go, the most expensive
    first, to the rank with the least load so far; complete ones only to ranks that have them, before divided ones.

    Args:
        costs: Cost of each matrix, in an order that is the same on every rank.
        whole_on: For each matrix, the ranks on which it is complete; empty if it is divided.
        loads: Initial load of each rank.
    """
    load = list(loads)
    owners = [0] * len(costs)
    # The sort is stable, so that every rank computes the same owners.
    by_cost = sorted(range(len(costs)), key=lambda number: -costs[number])
    # 1. A matrix that is complete on one rank stays there.
    for number in by_cost:
        if len(whole_on[number]) == 1:
            owners[number] = whole_on[number][0]
            load[owners[number]] += costs[number]
    # 2. A matrix that is complete on several ranks goes to one of them.
    for number in by_cost:
        if len(whole_on[number]) > 1:
            owners[number] = min(whole_on[number], key=lambda rank: (load[rank], rank))
            load[owners[number]] += costs[number]
    # 3. A divided matrix may go to any rank.
    heap = [(busy, rank) for rank, busy in enumerate(load)]
    heapq.heapify(heap)
    for number in by_cost:
        if not whole_on[number]:
            busy, owners[number] = heap[0]
            heapq.heapreplace(heap, (busy + costs[number], owners[number]))
    return owners


def work_of_owners(spec: OptimizerSpec, parameters: Iterable[Parameter], layout: Layout) -> list[MatrixWork]:
    """Return the optimizer work of each rank of one stage of one replica, by its index among them (tensor ranks are
    neighbors).

    Stacks of experts are owned where they are; other matrices are dealt by their FLOP.

    Args:
        spec: An optimizer; AdamW leaves every rank without a matrix.
        parameters: All parameters of the stage, in the order in which the module registers them.
        layout: Division of the parameters over the ranks.
    """
    ranks = layout.shard * layout.model_ranks
    works: list[MatrixWork] = []
    whole_on: list[Sequence[int]] = []
    # By the number of experts in a layer: the work of one expert's matrices in all layers.
    per_expert: dict[int, MatrixWork] = {}
    for parameter in parameters:
        if not takes_matrix(spec, parameter):
            continue
        *stack, rows, columns = parameter.shape
        work = matrix_work(spec, rows, columns)
        if stack and layout.expert_tensor == 1:
            per_expert[stack[0]] = per_expert.get(stack[0], MatrixWork()) + work
            continue
        complete_on = range(layout.tensor) if not stack and _is_whole(parameter, layout) else ()
        crossing = 0 if complete_on else work.elements
        count = stack[0] if stack else 1
        works += [dataclasses.replace(work, crossing_elements=crossing)] * count
        whole_on += [complete_on] * count
    owned = [MatrixWork()] * ranks
    for experts, work in per_expert.items():
        expert_counts = _experts_by_rank(experts, layout, ranks)
        owned = [before + work.times(count) for before, count in zip(owned, expert_counts, strict=True)]
    owners = deal_matrices([work.flops for work in works], whole_on, [work.flops for work in owned])
    for work, owner in zip(works, owners, strict=True):
        owned[owner] = owned[owner] + work
    return owned


def _is_whole(parameter: Parameter, layout: Layout) -> bool:
    """Return True if the first FSDP rank of a dense matrix has all of it."""
    shards = layout.shard * layout.context
    divided = parameter.parts_over(layout.tensor) > 1
    return not divided and -(-parameter.shape[0] // shards) == parameter.shape[0]


def _experts_by_rank(experts: int, layout: Layout, ranks: int) -> list[int]:
    """Return the number of a layer's experts that each of ``ranks`` ranks has completely. Shares are rounded up, so
    the last ranks may have fewer or none.
    """
    local_experts = experts // layout.expert
    most = -(-local_experts // layout.expert_shard)
    shares = (rank // layout.expert for rank in range(ranks))
    return [max(0, min(most, local_experts - share * most)) for share in shares]


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of a rank in the layout that determine its parameters."""

    pipeline: int = 0
    fsdp: int = 0
    """Index among the ranks over which a stage's dense parameters are sharded (shard and context together)."""
    tensor: int = 0


@dataclass(frozen=True)
class HeldParameter:
    """A rank's share of one parameter."""

    parameter: Parameter
    gathered: int
    """Number of elements while FSDP has the weights gathered: the rank's part before FSDP."""
    shape: tuple[int, ...]
    """Shape of the rank's own share."""

    @property
    def elements(self) -> int:
        """Number of elements in the rank's own share."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Holding:
    """Parameters of one rank."""

    place: RankPlace
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    """True if the rank has the output projection and the final norm."""
    pieces: tuple[HeldParameter, ...]
    """Its shares of parameters, in the order in which the module registers them."""

    @property
    def dense(self) -> int:
        """Number of elements of dense parameters."""
        return sum(piece.elements for piece in self.pieces if not piece.parameter.stacked)

    @property
    def experts(self) -> int:
        """Number of elements of routed experts."""
        return sum(piece.elements for piece in self.pieces if piece.parameter.stacked)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return self.dense + self.experts


def place_of(layout: Layout, rank: int) -> RankPlace:
    """Return the coordinates of the global rank ``rank``."""
    stage_ranks = layout.data_ranks * layout.model_ranks
    inner = rank % (layout.shard * layout.model_ranks)
    return RankPlace(rank // stage_ranks, inner // layout.tensor, inner % layout.tensor)


def stages_at(parallel: ParallelSpec, rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank: assigned round-robin, or down and up like a V with a schedule that splits the backward pass."""
    if parallel.pipeline == 1:
        return (0,)
    turns = range(stages_per_rank(parallel))
    up = parallel.pipeline_schedule in SPLIT_BACKWARD
    return tuple(
        turn * parallel.pipeline + (parallel.pipeline - 1 - rank if up and turn % 2 else rank)
        for turn in turns
    )


def holding(spec: RunSpec, layout: Layout, place: RankPlace) -> Holding:
    """Return the parameters of the rank at ``place`` for the model of a resolved ``spec``.

    Raises ``FactoryError`` for a user's model.
    """
    stages, layers = stages_at(spec.parallel, place.pipeline), stage_layers(spec)
    first, last = 0 in stages, len(layers) - 1 in stages
    own_layers = tuple(layer for stage in stages for layer in layers[stage])
    pieces = tuple(
        _piece(parameter, layout, place)
        for parameter in parameters(spec.model)
        if _is_in(parameter, frozenset(own_layers), first=first, last=last)
    )
    return Holding(place, stages, own_layers, first, last, pieces)


def fullest(spec: RunSpec, layout: Layout, pipeline: int) -> Holding:
    """Return the holding of the rank with the most elements among those of one pipeline rank.

    The first FSDP share is the largest; only the tensor ranks' parts may differ, by a row of the vocabulary.
    """
    ranks = (RankPlace(pipeline, 0, tensor) for tensor in {0, layout.tensor - 1})
    return max((holding(spec, layout, place) for place in ranks), key=lambda candidate: candidate.elements)


def state_bytes(spec: RunSpec, layout: Layout, holding: Holding, compute_bytes: int) -> dict[str, int]:
    """Return the bytes of a rank's state by kind, without activations and without kinds of 0 bytes.

    - weights and gradients: fp32, the rank's share.
    - moments: the optimizer's state, see ``moment_bytes``.
    - open sums: nodes of the binary tree over the rank's slots while its last slot is computed: one share for each level but one.
      With ZeRO-1 and the reproducible reduction, one full part for each level; the lowest, a slot's gradient, is in the
      compute dtype if the slot is one micro-batch.
    - slot gradients: fp32, of the full part, while the micro-batches of a slot accumulate.
    - compute copy: gathered weights in the compute dtype. ZeRO-3 keeps two blocks at a time, and what is outside blocks.
      Other shardings keep all. In fp32, only of parameters that are sharded.
    """
    sizes = {"weights": 4 * holding.elements}
    sizes["moments"] = moment_bytes(spec.optimizer, layout, holding)
    sizes["gradients"] = 4 * holding.elements
    rounds = max(spec.train.slots // layout.data_ranks, 1)
    full = sum(piece.gathered for piece in holding.pieces)
    sharded = [piece for piece in holding.pieces if _ranks_of(piece.parameter, layout) > 1]
    adds_own = spec.parallel.sharding == "zero1" and spec.train.reduction == "reproducible"
    if adds_own and layout.shard > 1 and rounds > 1:
        leaf_bytes = compute_bytes if micro_batches_per_slot(spec) == 1 and not spec.model.factory else 4
        sizes["open sums"] = held_bytes(rounds, leaf_bytes) * full
    else:
        sizes["open sums"] = max(rounds.bit_length() - 2, 0) * sizes["gradients"]
    if micro_batches_per_slot(spec) > 1:
        sizes["slot gradients"] = 4 * full
    copied = holding.pieces if compute_bytes != 4 else sharded
    sizes["compute copy"] = compute_bytes * _gathered_at_once(copied, keep=spec.parallel.sharding != "zero3")
    return {kind: size for kind, size in sizes.items() if size}


def moment_bytes(optimizer: OptimizerSpec, layout: Layout, holding: Holding) -> int:
    """Return the bytes of the optimizer's state: AdamW's for the rank's shares, and for full matrices those of the fullest owner.

    Owners are assigned by cost, not by rank. Any rank of a stage may be the fullest, so its matrices are counted here.
    """
    shares = sum(
        tensor.bytes
        for piece in holding.pieces
        if not takes_matrix(optimizer, piece.parameter)
        for tensor in adamw_state(optimizer, piece.shape)
    )
    owners = work_of_owners(optimizer, [piece.parameter for piece in holding.pieces], layout)
    return shares + max(work.state_bytes for work in owners)


def _gathered_at_once(pieces: Sequence[HeldParameter], *, keep: bool) -> int:
    """Return the most elements that are gathered at a time: all if ``keep``. Otherwise (ZeRO-3) those outside blocks,
    and of the two largest blocks with their experts.
    """
    if keep:
        return sum(piece.gathered for piece in pieces)
    blocks: Counter[str] = Counter()
    for piece in pieces:
        blocks[piece.parameter.unit.removesuffix(".ffn.experts")] += piece.gathered
    return blocks.pop("", 0) + blocks.pop(HEAD_UNIT, 0) + sum(size for _, size in blocks.most_common(2))


def _is_in(parameter: Parameter, layers: frozenset[int], *, first: bool, last: bool) -> bool:
    """Return True if a stage with these layers, and perhaps the first or the last, has the parameter."""
    if parameter.section == "block":
        return parameter.layer in layers
    return first if parameter.section == "embedding" else last


def _ranks_of(parameter: Parameter, layout: Layout) -> int:
    """Return the number of ranks over which FSDP divides a parameter."""
    return layout.expert_shard if parameter.stacked else layout.shard * layout.context


def _piece(parameter: Parameter, layout: Layout, place: RankPlace) -> HeldParameter:
    """Return a rank's piece of a parameter: its elements before FSDP divides it, and the shape of the FSDP share.

    Stacks of experts are divided by expert ranks first; others by tensor ranks, several of which may have the same
    part.
    """
    shape, share = list(parameter.shape), place.fsdp
    dim = parameter.tensor_dim
    if parameter.stacked:
        shape[0] //= layout.expert
        if dim is not None:
            shape[dim] //= layout.expert_tensor
        share = (place.fsdp * layout.tensor + place.tensor) // (layout.expert * layout.expert_tensor)
    elif dim is not None:
        size = shape[dim]
        parts = parameter.parts_over(layout.tensor)
        index = place.tensor * parts // layout.tensor
        shape[dim] = (index + 1) * size // parts - index * size // parts
    rows = _chunk(shape[0], share, _ranks_of(parameter, layout))
    return HeldParameter(parameter, math.prod(shape), (rows, *shape[1:]))


def _chunk(rows: int, index: int, ranks: int) -> int:
    """Return the rows of FSDP's share ``index`` of ``ranks``."""
    most = -(-rows // ranks)
    return max(0, min(most, rows - index * most))

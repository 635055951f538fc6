"""The parameters that each rank of a layout holds, and the owner ranks of whole matrices, in closed form: no torch, nothing built.

A parameter is divided in three ways, one after the other: the layers over the stages of the pipeline, each matrix over the
tensor ranks (the experts of a layer over the expert ranks), and what is left, along its first dimension, over the ranks that
hold the same (FSDP: ``ceil(rows / ranks)`` each, the last ones less or nothing). ``phalanx show --ranks`` prints these
numbers, the dry run (``phalanx.train.measure.dry_run``) holds them against the modules that the trainer really builds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.model.facts.optimizer_state import MatrixWork, adamw_state, matrix_work, takes_matrix
from phalanx.model.facts.shape import parameters, stage_layers
from phalanx.run.kinds.operations import HEAD_UNIT, Parameter
from phalanx.run.layout import SPLIT_BACKWARD, Layout, micro_batches_per_slot, stages_per_rank
from phalanx.run.spec import OptimizerSpec, ParallelSpec, RunSpec

# Owner ranks of whole matrices, for optimizers that cannot work on a shard.
#
# The ranks that hold one stage of one replica between them share its matrices out (``phalanx.train.optimizers.matrix_optimizer`` moves
# the data). A matrix that a rank holds whole stays where it is: experts, as FSDP divides stacks by whole experts, and what is
# alike on tensor ranks. The others are dealt, the costliest first, to whoever has least to do (Graham 1969).


def deal_matrices(
    costs: Sequence[float], whole_on: Sequence[Sequence[int]], loads: Sequence[float]
) -> list[int]:
    """The owner of each matrix.

    Args:
        costs: Of each matrix, in the order in which every rank lists them.
        whole_on: For each matrix, the ranks that hold it whole; empty if it is divided.
        loads: What each rank has to do already.
    """
    load = list(loads)
    owners = [0] * len(costs)
    # The sort is stable, so that every rank finds the same owners.
    falling = sorted(range(len(costs)), key=lambda number: -costs[number])
    # 1. What only one rank holds whole stays with it.
    for number in falling:
        if len(whole_on[number]) == 1:
            owners[number] = whole_on[number][0]
            load[owners[number]] += costs[number]
    # 2. What several hold whole goes to one of them.
    for number in falling:
        if len(whole_on[number]) > 1:
            owners[number] = min(whole_on[number], key=lambda rank: (load[rank], rank))
            load[owners[number]] += costs[number]
    # 3. What is divided goes to anybody.
    heap = [(busy, rank) for rank, busy in enumerate(load)]
    heapq.heapify(heap)
    for number in falling:
        if not whole_on[number]:
            busy, owners[number] = heap[0]
            heapq.heapreplace(heap, (busy + costs[number], owners[number]))
    return owners


def work_of_owners(spec: OptimizerSpec, parameters: Iterable[Parameter], layout: Layout) -> list[MatrixWork]:
    """The work that each rank of one stage of one replica owns, by its index among them (tensor ranks are neighbors).

    Args:
        spec: An optimizer; AdamW leaves every rank without a matrix.
        parameters: All of the stage's, in the order in which the module registers them.
        layout: How its ranks divide parameters.
    """
    ranks = layout.shard * layout.model_ranks
    works: list[MatrixWork] = []
    whole_on: list[Sequence[int]] = []
    per_expert: dict[
        int, MatrixWork
    ] = {}  # by the number of experts in a layer: one expert's matrices of all layers
    for parameter in parameters:
        if not takes_matrix(spec, parameter):
            continue
        *stack, rows, columns = parameter.shape
        work = matrix_work(spec, rows, columns)
        if stack and layout.expert_tensor == 1:
            per_expert[stack[0]] = per_expert.get(stack[0], MatrixWork()) + work
            continue
        whole = range(layout.tensor) if not stack and _is_whole(parameter, layout) else ()
        crossing = 0 if whole else work.elements
        count = stack[0] if stack else 1
        works += [dataclasses.replace(work, crossing_elements=crossing)] * count
        whole_on += [whole] * count
    owned = [MatrixWork()] * ranks
    for experts, work in per_expert.items():
        held = _experts_by_rank(experts, layout, ranks)
        owned = [before + work.times(count) for before, count in zip(owned, held, strict=True)]
    owners = deal_matrices([work.flops for work in works], whole_on, [work.flops for work in owned])
    for work, owner in zip(works, owners, strict=True):
        owned[owner] = owned[owner] + work
    return owned


def _is_whole(parameter: Parameter, layout: Layout) -> bool:
    """True if the first of the ranks that FSDP divides a dense matrix over holds all of it."""
    shards = layout.shard * layout.context
    divided = parameter.parts_over(layout.tensor) > 1
    return not divided and -(-parameter.shape[0] // shards) == parameter.shape[0]


def _experts_by_rank(experts: int, layout: Layout, ranks: int) -> list[int]:
    """Number of whole experts of a layer on each rank."""
    here = experts // layout.expert
    most = -(-here // layout.expert_shard)
    shares = (rank // layout.expert for rank in range(ranks))
    return [max(0, min(most, here - share * most)) for share in shares]


@dataclass(frozen=True)
class RankPlace:
    """The coordinates of a rank in the layout that decide which parameters it holds."""

    pipeline: int = 0
    fsdp: int = 0
    """Among the ranks that a stage's dense parameters are sharded over (shard and context together)."""
    tensor: int = 0


@dataclass(frozen=True)
class HeldParameter:
    """A rank's share of one parameter."""

    parameter: Parameter
    gathered: int
    """Elements while FSDP has the weights gathered: what the other axes leave."""
    shape: tuple[int, ...]
    """Shape of the rank's own share."""

    @property
    def held(self) -> int:
        """Elements of the rank's own share."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Holding:
    """The parameters that one rank holds."""

    place: RankPlace
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    """True if it has the output projection and the final norm."""
    pieces: tuple[HeldParameter, ...]
    """Its shares of parameters, in the order in which the module registers them."""

    @property
    def dense(self) -> int:
        """Elements of dense parameters."""
        return sum(piece.held for piece in self.pieces if not piece.parameter.stacked)

    @property
    def experts(self) -> int:
        """Elements of routed experts."""
        return sum(piece.held for piece in self.pieces if piece.parameter.stacked)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return self.dense + self.experts


def place_of(layout: Layout, rank: int) -> RankPlace:
    """The place of rank ``rank`` of the whole layout."""
    stage_ranks = layout.data_ranks * layout.model_ranks
    inner = rank % (layout.shard * layout.model_ranks)
    return RankPlace(rank // stage_ranks, inner // layout.tensor, inner % layout.tensor)


def stages_at(parallel: ParallelSpec, rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank: dealt round by round, or down and up like a V."""
    if parallel.pipeline == 1:
        return (0,)
    turns = range(stages_per_rank(parallel))
    up = parallel.pipeline_schedule in SPLIT_BACKWARD
    return tuple(
        turn * parallel.pipeline + (parallel.pipeline - 1 - rank if up and turn % 2 else rank)
        for turn in turns
    )


def holding(spec: RunSpec, layout: Layout, place: RankPlace) -> Holding:
    """The parameters that the rank at ``place`` holds of the model of ``spec``, which is resolved."""
    stages, layers = stages_at(spec.parallel, place.pipeline), stage_layers(spec)
    first, last = 0 in stages, len(layers) - 1 in stages
    mine = tuple(layer for stage in stages for layer in layers[stage])
    pieces = tuple(
        _piece(parameter, layout, place)
        for parameter in parameters(spec.model)
        if _is_in(parameter, frozenset(mine), first=first, last=last)
    )
    return Holding(place, stages, mine, first, last, pieces)


def fullest(spec: RunSpec, layout: Layout, pipeline: int) -> Holding:
    """The parameters of the rank that holds most among those of one pipeline rank.

    Of all shares of a part the first is the largest; only the tensor ranks' parts may differ, by a row of the vocabulary.
    """
    ranks = (RankPlace(pipeline, 0, tensor) for tensor in {0, layout.tensor - 1})
    return max((holding(spec, layout, place) for place in ranks), key=lambda held: held.elements)


def state_bytes(spec: RunSpec, layout: Layout, held: Holding, compute_bytes: int) -> dict[str, int]:
    """Bytes of what a rank keeps, by kind, without activations.

    - weights and gradients: fp32, its own share.
    - moments: what the optimizer keeps, see ``moment_bytes``.
    - open sums: beside the gradients, what a binary tree over the rank's slots holds while its last slot is computed: a
      share for each level but one.
    - slot gradients: of the whole part, fp32, while the micro-batches of a slot add up.
    - compute copy: gathered weights in the format of computing. ZeRO-3 gathers a block before it is needed and gives it up
      after: two at a time, beside embedding and head. The others keep all.
    """
    sizes = {"weights": 4 * held.elements}
    sizes["moments"] = moment_bytes(spec.optimizer, layout, held)
    sizes["gradients"] = 4 * held.elements
    rounds = max(spec.train.slots // layout.data_ranks, 1)
    sizes["open sums"] = max(rounds.bit_length() - 2, 0) * sizes["gradients"]
    sharded = [piece for piece in held.pieces if _ranks_of(piece.parameter, layout) > 1]
    if micro_batches_per_slot(spec) > 1:
        sizes["slot gradients"] = 4 * sum(piece.gathered for piece in held.pieces)
    copied = held.pieces if compute_bytes != 4 else sharded
    sizes["compute copy"] = compute_bytes * _gathered_at_once(copied, keep=spec.parallel.sharding != "zero3")
    return {kind: size for kind, size in sizes.items() if size}


def moment_bytes(optimizer: OptimizerSpec, layout: Layout, held: Holding) -> int:
    """Bytes of the optimizer's state: AdamW's of what the rank holds, and of whole matrices what the fullest owner has.

    Owners are dealt by cost, not by place: of a stage's ranks any may be the fullest, and its matrices are counted here.
    """
    shares = sum(
        tensor.bytes
        for piece in held.pieces
        if not takes_matrix(optimizer, piece.parameter)
        for tensor in adamw_state(optimizer, piece.shape)
    )
    owners = work_of_owners(optimizer, [piece.parameter for piece in held.pieces], layout)
    return shares + max(work.state_bytes for work in owners)


def _gathered_at_once(pieces: Sequence[HeldParameter], *, keep: bool) -> int:
    if keep:
        return sum(piece.gathered for piece in pieces)
    blocks: Counter[str] = Counter()
    for piece in pieces:
        blocks[piece.parameter.unit.removesuffix(".ffn.experts")] += piece.gathered
    return blocks.pop("", 0) + blocks.pop(HEAD_UNIT, 0) + sum(size for _, size in blocks.most_common(2))


def _is_in(parameter: Parameter, layers: frozenset[int], *, first: bool, last: bool) -> bool:
    if parameter.section == "block":
        return parameter.layer in layers
    return first if parameter.section == "embedding" else last


def _ranks_of(parameter: Parameter, layout: Layout) -> int:
    """Ranks that FSDP divides a parameter over."""
    return layout.expert_shard if parameter.stacked else layout.shard * layout.context


def _piece(parameter: Parameter, layout: Layout, place: RankPlace) -> HeldParameter:
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
    """Rows of FSDP's share ``index`` of ``ranks``."""
    most = -(-rows // ranks)
    return max(0, min(most, rows - index * most))

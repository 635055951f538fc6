"""Assigns whole matrices to owner ranks, for optimizers that cannot work on a shard: pure, without torch.

The ranks that hold one stage of one replica between them share its matrices out (``phalanx.train.optimizers.matrix.matrix_optimizer`` moves
the data). A matrix that a rank holds whole stays where it is: experts, as FSDP divides stacks by whole experts, and what is
alike on tensor ranks. The others are dealt, the costliest first, to whoever has least to do (Graham 1969).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from phalanx.model.facts.optimizer_state import MatrixWork, matrix_work, takes_matrix
from phalanx.run.kinds.operations import Parameter
from phalanx.run.layout import Layout
from phalanx.run.spec import OptimizerSpec


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

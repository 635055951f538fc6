"""Layers of each kind, and ends of the model, on every pipeline rank, for many pipelines at once.

Ranks that hold alike are one *place*, represented by the earliest of them, which holds most micro-batches in flight. A place
that has no more of anything than an earlier one can be neither the fullest nor the slowest, and is left out; so the worst rank is
found among two or three places instead of among all ranks. Layers are divided as ``phalanx.model.facts.stages``
divides them, by the same dynamic programme in arrays, solved once for all numbers of stages.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from phalanx.model.facts.stages import layer_costs
from phalanx.plan.workload.candidates import Floats, Ints
from phalanx.plan.workload.stacks import Stack, Workload
from phalanx.run.kinds.mixture import is_mixture


@dataclass(frozen=True)
class Places:
    """Kinds of ranks of each pipeline that can be the worst, shape (pipelines, kinds); fewer kinds are filled up with the first."""

    dense: Ints
    """Layers without a mixture of experts."""
    mixture: Ints
    embedding: Ints
    """1 where the rank has the embedding; where it is also the output projection, first and last rank have it."""
    head: Ints
    """1 where it has the final norm, the output projection, and layers that predict further ahead."""
    rank: Ints
    """The earliest pipeline rank of the kind."""
    layers: tuple[int, int]
    """Layers of the whole model: without and with a mixture."""
    number: Ints
    """Kinds of each pipeline, without those repeated."""

    @property
    def kinds(self) -> int:
        """The largest number of kinds."""
        return int(self.dense.shape[1])

    @cached_property
    def counts(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Dense layers, mixtures, embeddings and heads as numbers to multiply bytes and seconds with."""
        dense, mixture, embedding, head = (
            np.ascontiguousarray(column, dtype=np.float64)
            for column in (self.dense, self.mixture, self.embedding, self.head)
        )
        return dense, mixture, embedding, head


def places(workload: Workload, stack: Stack, pipelines: list[tuple[int, int, bool]]) -> Places:
    """The places of each pipeline, given as (ranks, stages on each, whether they go down and up like a V)."""
    sizes_of = _splits(workload, stack, {ranks * per_rank for ranks, per_rank, _ in pipelines})
    mixture = tuple(is_mixture(workload.model, layer) for layer in range(workload.model.layers))
    found = [
        _kinds(
            sizes_of[ranks * per_rank], mixture, ranks, per_rank, folded, tied=workload.model.tie_embeddings
        )
        for ranks, per_rank, folded in pipelines
    ]
    longest = max(map(len, found))
    table = np.array([kinds + kinds[:1] * (longest - len(kinds)) for kinds in found], dtype=np.int64)
    dense, mixed, embedding, head, rank = np.moveaxis(table, 2, 0)
    whole = (mixture.count(False), mixture.count(True))
    return Places(dense, mixed, embedding, head, rank, whole, np.array([len(kinds) for kinds in found]))


_PlaceRow = tuple[int, int, int, int, int]


@lru_cache(maxsize=1 << 12)
def _kinds(
    sizes: tuple[int, ...], mixture: tuple[bool, ...], ranks: int, per_rank: int, folded: bool, *, tied: bool
) -> tuple[_PlaceRow, ...]:
    """(dense, mixture, embedding, head, rank) of each kind of rank that has more of something than every earlier one."""
    before = [0, *accumulate(mixture)]
    bounds = [0, *accumulate(sizes)]
    mixtures = [before[end] - before[begin] for begin, end in pairwise(bounds)]
    found: list[_PlaceRow] = []
    last = len(sizes) - 1
    for rank in range(ranks):
        stages = [
            turn * ranks + (ranks - 1 - rank if folded and turn % 2 else rank) for turn in range(per_rank)
        ]
        total, mixed = (sum(amounts[stage] for stage in stages) for amounts in (sizes, mixtures))
        first, end = 0 in stages, last in stages
        held = (total - mixed, mixed, first or (tied and end), end)
        if not any(all(map(operator.ge, earlier, held)) for earlier in found):
            found.append((*held, rank))
    return tuple(found)


def split(workload: Workload, stack: Stack, stages: int) -> tuple[int, ...]:
    """Layers of each of ``stages`` stages. Raises ``ValueError`` when there are more stages than layers."""
    return _splits(workload, stack, {stages})[stages]


def most_stages(workload: Workload, stack: Stack) -> int:
    """The largest number of stages; an even split may give the first and the last stage nothing but the model's ends."""
    return workload.model.layers + (2 if stack.split == "even" else 0)


def _splits(workload: Workload, stack: Stack, counts: set[int]) -> dict[int, tuple[int, ...]]:
    layers, most = workload.model.layers, most_stages(workload, stack)
    if max(counts) > most:
        raise ValueError(f"{layers} layers cannot be divided into {max(counts)} stages: take at most {most}")
    if stack.split == "even":
        return {count: _even(layers, count) for count in counts}
    if stack.split == "last":
        return {count: _last_less(layers, count) for count in counts}
    costs = np.array(layer_costs(workload.model, workload.seq_len))
    return balanced(costs, counts)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages; if the layers do not divide, the first and last have one less, or else the first ones one more."""
    each, rest = divmod(layers, stages)
    if rest == 0:
        return (each,) * stages
    if (layers + 2) % stages == 0 and stages > 2:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return (each + 1,) * rest + (each,) * (stages - rest)


def _last_less(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, of which the last has what is left; equal ones if that would be nothing."""
    each = -(-layers // stages)
    rest = layers - (stages - 1) * each
    return (each,) * (stages - 1) + (rest,) if rest > 0 else _even(layers, stages)


def balanced(costs: Floats, counts: set[int]) -> dict[int, tuple[int, ...]]:
    """``phalanx.model.facts.stages.balance`` for several numbers of stages at once: sizes that make the dearest stage cheapest.

    Stage by stage, a table holds for the first ``end`` layers the dearest stage, the sum of squares (which prefers even stages
    among equals) and the last boundary; each new table is a minimum over all boundaries, taken for all ends at once.
    """
    boundaries = _boundaries(tuple(costs.tolist()))
    return {count: _trace(boundaries, len(costs), count) for count in counts}


@lru_cache(maxsize=8)
def _boundaries(costs: tuple[float, ...]) -> list[Ints]:
    """For each number of stages, where the last of them begins if it ends before layer ``end``, by ``end``."""
    layers = len(costs)
    before = np.concatenate(([0.0], np.cumsum(costs)))
    between = before[None, :] - before[:, None]
    earlier = np.tri(layers + 1, k=-1, dtype=bool).T
    dearest, squares = np.full((2, layers + 1), np.inf)
    dearest[0] = squares[0] = 0.0
    boundaries = [np.zeros(layers + 1, dtype=np.int64)]
    for _ in range(layers):
        dear = np.where(earlier, np.maximum(dearest[:, None], between), np.inf)
        least = dear.min(axis=0)
        square = np.where(dear == least, squares[:, None] + between * between, np.inf)
        boundaries.append(square.argmin(axis=0))
        dearest, squares = least, square.min(axis=0)
    return boundaries


def _trace(boundaries: list[Ints], layers: int, stages: int) -> tuple[int, ...]:
    sizes, end = [], layers
    for stage in range(stages, 0, -1):
        begin = int(boundaries[stage][end])
        sizes.append(end - begin)
        end = begin
    return tuple(reversed(sizes))

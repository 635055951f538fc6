"""Division of a model, for arrays of layouts: layers and ends on every pipeline rank, and the parameters of each kind on a rank.

Ranks with equal contents are one *place*, represented by the earliest of them, which has most micro-batches in flight. A place
that has no more of anything than an earlier one can be neither the fullest nor the slowest, and is left out. So the worst rank is
among two or three places instead of all ranks. Layers are divided by the dynamic program of ``phalanx.model.facts.shape``, in arrays,
solved once for all numbers of stages.

The division is that of ``phalanx.model.facts.holdings`` for one rank of one layout: a matrix over tensor ranks (experts over expert
ranks), then over the ranks that share state. These divide by rows, ``ceil(rows / ranks)`` each, as this project does, or one flat
buffer into equal parts (``Stack.shards``). All figures are those of the rank with the largest share.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from phalanx.model.facts.holdings import work_of_owners
from phalanx.model.facts.optimizer_state import adamw_state, takes_matrix
from phalanx.model.facts.shape import layer_costs, outside_blocks
from phalanx.run.kinds import block
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.operations import Parameter
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec, OptimizerSpec
from phalanx_plan.workload.architecture import KINDS
from phalanx_plan.workload.candidates import Candidates, Floats, Ints, at_last, distinct
from phalanx_plan.workload.stacks import Stack, TrainingWorkload

# Layers of each kind on every pipeline rank.


@dataclass(frozen=True)
class PipelinePlaces:
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


def places(
    workload: TrainingWorkload, stack: Stack, pipelines: list[tuple[int, int, bool]]
) -> PipelinePlaces:
    """Return, for each pipeline, the kinds of ranks that can be the worst.

    These have more of something (layers without or with experts, embedding, head) than every earlier rank. Pipelines
    are (ranks, stages on each, whether they go down and up like a V); those with fewer kinds are padded with their
    first. Raises ``ValueError`` for more stages than there are layers to divide.
    """
    sizes_of = _splits(workload, stack, {ranks * per_rank for ranks, per_rank, _ in pipelines})
    mixture = tuple(is_mixture(workload.model, layer) for layer in range(workload.model.layers))
    all_kinds = [
        _kinds(
            sizes_of[ranks * per_rank], mixture, ranks, per_rank, folded, tied=workload.model.tie_embeddings
        )
        for ranks, per_rank, folded in pipelines
    ]
    longest = max(map(len, all_kinds))
    table = np.array([kinds + kinds[:1] * (longest - len(kinds)) for kinds in all_kinds], dtype=np.int64)
    dense, mixed, embedding, head, rank = np.moveaxis(table, 2, 0)
    layer_counts = (mixture.count(False), mixture.count(True))
    return PipelinePlaces(
        dense, mixed, embedding, head, rank, layer_counts, np.array([len(kinds) for kinds in all_kinds])
    )


_PlaceRow = tuple[int, int, int, int, int]


@lru_cache(maxsize=1 << 12)
def _kinds(
    sizes: tuple[int, ...], mixture: tuple[bool, ...], ranks: int, per_rank: int, folded: bool, *, tied: bool
) -> tuple[_PlaceRow, ...]:
    """Return (dense, mixture, embedding, head, rank) of each rank that has more of something than every earlier one.

    ``tied`` embeddings are counted on the rank of the head too.
    """
    before = [0, *accumulate(mixture)]
    bounds = [0, *accumulate(sizes)]
    mixtures = [before[end] - before[begin] for begin, end in pairwise(bounds)]
    rows: list[_PlaceRow] = []
    last = len(sizes) - 1
    for rank in range(ranks):
        stages = [
            turn * ranks + (ranks - 1 - rank if folded and turn % 2 else rank) for turn in range(per_rank)
        ]
        total, mixed = (sum(amounts[stage] for stage in stages) for amounts in (sizes, mixtures))
        first, end = 0 in stages, last in stages
        amounts_of_rank = (total - mixed, mixed, first or (tied and end), end)
        if not any(all(map(operator.ge, earlier, amounts_of_rank)) for earlier in rows):
            rows.append((*amounts_of_rank, rank))
    return tuple(rows)


def split(workload: TrainingWorkload, stack: Stack, stages: int) -> tuple[int, ...]:
    """Layers of each of ``stages`` stages. Raises ``ValueError`` when there are more stages than layers."""
    return _splits(workload, stack, {stages})[stages]


def most_stages(workload: TrainingWorkload, stack: Stack) -> int:
    """The largest number of stages; an even split may give the first and the last stage nothing but the model's ends."""
    return workload.model.layers + (2 if stack.split == "even" else 0)


def _splits(workload: TrainingWorkload, stack: Stack, counts: set[int]) -> dict[int, tuple[int, ...]]:
    """Return the layers of each stage, by number of stages, as the stack splits them. Raises ``ValueError`` for too many stages."""
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
    each, remainder = divmod(layers, stages)
    if remainder == 0:
        return (each,) * stages
    if (layers + 2) % stages == 0 and stages > 2:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return (each + 1,) * remainder + (each,) * (stages - remainder)


def _last_less(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, of which the last has what is left; equal ones if that would be nothing."""
    each = -(-layers // stages)
    last_size = layers - (stages - 1) * each
    return (each,) * (stages - 1) + (last_size,) if last_size > 0 else _even(layers, stages)


def balanced(costs: Floats, counts: set[int]) -> dict[int, tuple[int, ...]]:
    """Return, by number of stages, layers of each stage that make the stage of the highest cost as cheap as possible.

    Equals ``phalanx.model.facts.shape.balance`` for each of ``counts``. Stage by stage, a table holds for the first
    ``end`` layers the highest cost, the sum of squares (which prefers even stages among equals) and the last
    boundary; each new table is a minimum over all boundaries, taken for all ends at once.
    """
    boundaries = _boundaries(tuple(costs.tolist()))
    return {count: _trace(boundaries, len(costs), count) for count in counts}


@lru_cache(maxsize=8)
def _boundaries(costs: tuple[float, ...]) -> list[Ints]:
    """Return, for each number of stages, an array over ``end``: the first layer of the last stage if that ends before
    layer ``end``.

    It minimizes the cost of the most expensive stage, then the sum of squares.
    """
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
    """Return the layers of each of ``stages`` stages, read back from the table of ``_boundaries``."""
    sizes, end = [], layers
    for stage in range(stages, 0, -1):
        begin = int(boundaries[stage][end])
        sizes.append(end - begin)
        end = begin
    return tuple(reversed(sizes))


# Parameters of a rank.


@dataclass(frozen=True)
class HoldingsTable:
    """Elements by kind of ``KINDS``, one entry for each combination of degrees; of length one where no degree matters."""

    dense: tuple[Floats, ...]
    """Elements of one layer or end of the model without routed experts, divided over tensor ranks but not over data-parallel ranks."""
    experts: tuple[Floats, ...]
    dense_share: tuple[Floats, ...]
    """The same, divided over ``Candidates.dense_shard`` ranks."""
    experts_share: tuple[Floats, ...]
    block: tuple[Floats, ...]
    """Elements of ``dense`` and ``experts`` that FSDP gathers as one block; the rest is gathered for a whole pass."""
    moment_bytes_share: tuple[Floats, ...] = ()
    """Bytes that AdamW keeps of the rank's shares; without what an optimizer of whole matrices keeps with their owners.
    Empty for stacks that keep the same of every parameter."""


def _looked_up(name: str) -> cached_property[tuple[Floats, ...]]:
    """Return the property of ``Holdings`` for a field of its table: the entries of each candidate. Arrays of one entry broadcast, and stay
    as they are.
    """

    def entries(holdings: Holdings) -> tuple[Floats, ...]:
        column: tuple[Floats, ...] = getattr(holdings.table, name)
        return tuple(array.take(holdings.row) if array.size > 1 else array for array in column)

    return cached_property(entries)


@dataclass(frozen=True)
class Holdings:
    """A ``HoldingsTable`` looked up in the candidates' axes; each field is looked up when it is read."""

    table: HoldingsTable
    row: Ints
    """Row of each candidate in ``table``."""

    dense = _looked_up("dense")
    experts = _looked_up("experts")
    dense_share = _looked_up("dense_share")
    experts_share = _looked_up("experts_share")
    block = _looked_up("block")
    moment_bytes_share = _looked_up("moment_bytes_share")

    def rows(self, index: slice | Ints, length: int) -> Holdings:
        """The holdings of the candidates at ``index`` of the last axis, which is ``length`` long."""
        return Holdings(self.table, at_last(self.row, index, length))


@dataclass(frozen=True)
class _Degrees:
    """The degrees of a candidate that decide what a layer's rank holds."""

    tensor: Ints
    expert: Ints
    expert_tensor: Ints
    dense_shard: Ints
    expert_shard: Ints


def holdings(
    model: ModelSpec,
    candidates: Candidates,
    shards: Literal["flat", "rows"] = "rows",
    optimizer: OptimizerSpec | None = None,
) -> Holdings:
    """Return elements of one layer of each kind on a rank, and its share if data-parallel ranks divide ``shards``
    ("rows" or flat).

    Computed once for all candidates with equal degrees. With ``optimizer``, also the bytes of AdamW's moments.
    """
    values, row = distinct([getattr(candidates, field.name) for field in dataclasses.fields(_Degrees)])
    return Holdings(_holdings(model, _Degrees(*values), optimizer, whole_rows=shards == "rows"), row)


def _holdings(
    model: ModelSpec, degrees: _Degrees, optimizer: OptimizerSpec | None, *, whole_rows: bool
) -> HoldingsTable:
    """Return what a rank holds of one layer of each of ``KINDS``: elements, its shares, and what FSDP gathers as one block.

    ``optimizer`` None leaves ``moment_bytes_share`` an empty tuple.
    """
    by_kind = [list(_of_kind(model, kind)) for kind in KINDS]
    ahead = [p for p in by_kind[KINDS.index("head")] if p.in_block]
    return HoldingsTable(
        dense=tuple(_sum(_dense(p, degrees) for p in parameters if not p.stacked) for parameters in by_kind),
        experts=tuple(_sum(_stacked(p, degrees) for p in parameters if p.stacked) for parameters in by_kind),
        dense_share=tuple(
            _sum(_dense_share(p, degrees, whole_rows=whole_rows) for p in parameters if not p.stacked)
            for parameters in by_kind
        ),
        experts_share=tuple(
            _sum(_stacked_share(p, degrees, whole_rows=whole_rows) for p in parameters if p.stacked)
            for parameters in by_kind
        ),
        block=tuple(
            _sum(_stacked(p, degrees) if p.stacked else _dense(p, degrees) for p in parameters)
            for parameters in (*by_kind[:2], [], ahead)
        ),
        moment_bytes_share=()
        if optimizer is None
        else tuple(
            _sum(_adamw_share(p, degrees, optimizer) for p in parameters if not takes_matrix(optimizer, p))
            for parameters in by_kind
        ),
    )


def _of_kind(model: ModelSpec, kind: str) -> Iterator[Parameter]:
    """Yield the parameters of one layer of a kind, or of an end of the model; none for mixtures of a dense model."""
    if kind == "dense" or (kind == "mixture" and model.moe is not None):
        yield from block.placed("block", 0, block.parts(model, mixed=kind == "mixture"))
    elif kind != "mixture":
        parts = outside_blocks(model)
        yield from (part for part in parts if (part.section == "embedding") == (kind == "embedding"))


def _sum(terms: Iterator[Floats]) -> Floats:
    """Add up arrays; shape (1,) and 0 without any."""
    return np.asarray(sum(terms, np.zeros(1)), dtype=np.float64)


def _dense(parameter: Parameter, degrees: _Degrees) -> Floats:
    """Elements of a tensor rank's part of a parameter."""
    rows, columns = _rows_and_columns(parameter, degrees)
    return rows * columns


def _dense_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    """Elements of a rank's share of a dense parameter; ``whole_rows`` shares out only whole rows."""
    rows, columns = _rows_and_columns(parameter, degrees)
    return _share(rows, degrees.dense_shard, whole_rows=whole_rows) * columns


def _rows_and_columns(parameter: Parameter, degrees: _Degrees) -> tuple[Floats, Floats]:
    """Rows and columns of a tensor rank's part of a dense parameter."""
    rows, columns = float(parameter.shape[0]), float(parameter.numel // parameter.shape[0])
    dim, parts = parameter.tensor_dim, np.minimum(degrees.tensor, parameter.most_parts or degrees.tensor)
    own_rows = np.ceil(rows / parts) if dim == 0 else np.asarray(rows)
    return own_rows, columns / parts if dim == 1 else np.asarray(columns)


def _stacked(parameter: Parameter, degrees: _Degrees) -> Floats:
    """Elements of a rank's part of stacked experts."""
    return np.asarray(parameter.numel / degrees.expert / degrees.expert_tensor)


def _stacked_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    """Elements of a rank's share of stacked experts."""
    experts, expert_elements = parameter.shape[0], parameter.numel // parameter.shape[0]
    own_experts = _share(experts / degrees.expert, degrees.expert_shard, whole_rows=whole_rows)
    return own_experts * expert_elements / degrees.expert_tensor


def _adamw_share(parameter: Parameter, degrees: _Degrees, optimizer: OptimizerSpec) -> Floats:
    """Bytes of AdamW's moments of a rank's share of a parameter, which has complete rows."""
    if parameter.stacked:
        elements, over = _stacked_share(parameter, degrees, whole_rows=True), degrees.expert_tensor
    else:
        elements, over = _dense_share(parameter, degrees, whole_rows=True), degrees.tensor
    last = len(parameter.shape) - 1
    columns = parameter.shape[-1] / (over if last and parameter.tensor_dim == last else np.ones(1))
    return elements / columns * _adamw_row_bytes(optimizer, len(parameter.shape), columns)


def _adamw_row_bytes(optimizer: OptimizerSpec, dims: int, columns: Floats) -> Floats:
    """Bytes of AdamW's moments of one row of a parameter, for each number of columns."""
    lengths, length_index = np.unique(np.ceil(columns), return_inverse=True)
    leading = (1,) * (dims - 1)
    rows = [adamw_state(optimizer, (*leading, int(length))) for length in lengths]
    sizes = np.array([float(sum(tensor.bytes for tensor in tensors)) for tensors in rows])
    return sizes[length_index].reshape(np.shape(columns))


@dataclass(frozen=True)
class OwnedMatrices:
    """Matrices that an optimizer assigns to owners among the ranks of a stage, undivided: figures of the fullest and the busiest owner."""

    state_bytes: Floats
    """State of the fullest owner; the other fields are of the busiest owner, by FLOP."""
    moved_bytes: Floats
    product_flops: Floats
    decomposition_flops: Floats
    crossing_bytes: Floats
    """Gradients that come to it, fp32; as many bytes go back."""


def owned_matrices(
    optimizer: OptimizerSpec, model: ModelSpec, candidates: Candidates, counts: tuple[Floats, ...]
) -> OwnedMatrices:
    """Return the matrices of the busiest owner where a rank has ``counts`` of each of ``KINDS``; see
    ``phalanx.model.facts.holdings``.

    State bytes are those of the owner with most state. Computed once for equal stages.
    """
    degrees = (candidates.tensor, candidates.dense_shard, candidates.expert, candidates.expert_tensor)
    columns, row = distinct([*(count.astype(np.int64) for count in counts), *degrees])
    rows = [
        _most_owned(optimizer, model, key[:4], *key[4:])
        for key in zip(*(c.tolist() for c in columns), strict=True)
    ]
    return OwnedMatrices(*(np.array(column, dtype=np.float64)[row] for column in zip(*rows, strict=True)))


@lru_cache(maxsize=1 << 14)
def _most_owned(
    optimizer: OptimizerSpec,
    model: ModelSpec,
    counts: tuple[int, ...],
    tensor: int,
    dense_shard: int,
    expert: int,
    expert_tensor: int,
) -> tuple[float, ...]:
    """Return the fields of ``OwnedMatrices`` for one layout of one stage: most state, and the work of the owner with most FLOP."""
    parameters = [p for kind, n in zip(KINDS, counts, strict=True) for p in n * list(_of_kind(model, kind))]
    layout = Layout(shard=dense_shard, tensor=tensor, expert=expert, expert_tensor=expert_tensor)
    owners = work_of_owners(optimizer, parameters, layout)
    busiest = max(owners, key=lambda work: work.flops)
    return (
        max(work.state_bytes for work in owners),
        busiest.moved_bytes,
        busiest.product_flops,
        busiest.decomposition_flops,
        4 * busiest.crossing_elements,
    )


def _share(rows: Floats, ranks: Ints, *, whole_rows: bool) -> Floats:
    """Rows of a rank out of ``ranks``; ``whole_rows`` rounds up."""
    return np.ceil(rows / ranks) if whole_rows else rows / ranks

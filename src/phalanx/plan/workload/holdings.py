"""Number of parameters of each kind that a rank holds, for arrays of layouts.

The same division as ``phalanx.model.facts.holdings`` makes for one rank of one layout: a matrix over tensor ranks (experts over expert
ranks), then over the ranks that share state. These divide by rows, ``ceil(rows / ranks)`` each, as this project does, or one flat
buffer into equal parts (``Stack.shards``). The rank with the largest share is meant throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from phalanx.model.facts.matrix_owners import work_of_owners
from phalanx.model.facts.optimizer_state import adamw_state, takes_matrix
from phalanx.model.facts.shape import outside_blocks
from phalanx.plan.workload.architecture import KINDS
from phalanx.plan.workload.candidates import Candidates, Floats, Ints, at_last, distinct
from phalanx.run.kinds import block
from phalanx.run.kinds.parts import Parameter
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec, OptimizerSpec


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


@dataclass(frozen=True)
class Holdings:
    """A ``HoldingsTable`` looked up in the candidates' axes, field by field as they are asked for."""

    table: HoldingsTable
    row: Ints
    """Row of each candidate in ``table``."""

    def rows(self, index: slice | Ints, length: int) -> Holdings:
        """The holdings of the candidates at ``index`` of the last axis, which is ``length`` long."""
        return Holdings(self.table, at_last(self.row, index, length))

    @cached_property
    def dense(self) -> tuple[Floats, ...]:
        """``HoldingsTable.dense``."""
        return self._spread(self.table.dense)

    @cached_property
    def experts(self) -> tuple[Floats, ...]:
        """``HoldingsTable.experts``."""
        return self._spread(self.table.experts)

    @cached_property
    def dense_share(self) -> tuple[Floats, ...]:
        """``HoldingsTable.dense_share``."""
        return self._spread(self.table.dense_share)

    @cached_property
    def experts_share(self) -> tuple[Floats, ...]:
        """``HoldingsTable.experts_share``."""
        return self._spread(self.table.experts_share)

    @cached_property
    def block(self) -> tuple[Floats, ...]:
        """``HoldingsTable.block``."""
        return self._spread(self.table.block)

    @cached_property
    def moment_bytes_share(self) -> tuple[Floats, ...]:
        """``HoldingsTable.moment_bytes_share``."""
        return self._spread(self.table.moment_bytes_share)

    def _spread(self, arrays: tuple[Floats, ...]) -> tuple[Floats, ...]:
        return tuple(array.take(self.row) if array.size > 1 else array for array in arrays)


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
    """Elements of one layer of each kind on a rank, where data-parallel ranks divide ``shards``."""
    values, row = distinct([getattr(candidates, field.name) for field in dataclasses.fields(_Degrees)])
    return Holdings(_holdings(model, _Degrees(*values), optimizer, whole_rows=shards == "rows"), row)


def _holdings(
    model: ModelSpec, degrees: _Degrees, optimizer: OptimizerSpec | None, *, whole_rows: bool
) -> HoldingsTable:
    by_kind = [list(_of_kind(model, kind)) for kind in KINDS]
    ahead = [p for p in by_kind[KINDS.index("head")] if p.in_block]
    return HoldingsTable(
        dense=tuple(_sum(_dense(p, degrees) for p in found if not p.stacked) for found in by_kind),
        experts=tuple(_sum(_stacked(p, degrees) for p in found if p.stacked) for found in by_kind),
        dense_share=tuple(
            _sum(_dense_share(p, degrees, whole_rows=whole_rows) for p in found if not p.stacked)
            for found in by_kind
        ),
        experts_share=tuple(
            _sum(_stacked_share(p, degrees, whole_rows=whole_rows) for p in found if p.stacked)
            for found in by_kind
        ),
        block=tuple(
            _sum(_stacked(p, degrees) if p.stacked else _dense(p, degrees) for p in found)
            for found in (*by_kind[:2], [], ahead)
        ),
        moment_bytes_share=()
        if optimizer is None
        else tuple(
            _sum(_adamw_share(p, degrees, optimizer) for p in found if not takes_matrix(optimizer, p))
            for found in by_kind
        ),
    )


def _of_kind(model: ModelSpec, kind: str) -> Iterator[Parameter]:
    """The parameters of one layer of a kind, or of an end of the model."""
    if kind == "dense" or (kind == "mixture" and model.moe is not None):
        yield from block.placed("block", 0, block.parts(model, mixed=kind == "mixture"))
    elif kind != "mixture":
        parts = outside_blocks(model)
        yield from (part for part in parts if (part.section == "embedding") == (kind == "embedding"))


def _sum(terms: Iterator[Floats]) -> Floats:
    return np.asarray(sum(terms, np.zeros(1)), dtype=np.float64)


def _dense(parameter: Parameter, degrees: _Degrees) -> Floats:
    rows, columns = _rows_and_columns(parameter, degrees)
    return rows * columns


def _dense_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    rows, columns = _rows_and_columns(parameter, degrees)
    return _share(rows, degrees.dense_shard, whole_rows=whole_rows) * columns


def _rows_and_columns(parameter: Parameter, degrees: _Degrees) -> tuple[Floats, Floats]:
    """Rows and columns of a tensor rank's part of a dense parameter."""
    rows, rest = float(parameter.shape[0]), float(parameter.numel // parameter.shape[0])
    dim, parts = parameter.tensor_dim, np.minimum(degrees.tensor, parameter.most_parts or degrees.tensor)
    mine = np.ceil(rows / parts) if dim == 0 else np.asarray(rows)
    return mine, rest / parts if dim == 1 else np.asarray(rest)


def _stacked(parameter: Parameter, degrees: _Degrees) -> Floats:
    return np.asarray(parameter.numel / degrees.expert / degrees.expert_tensor)


def _stacked_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    experts, rest = parameter.shape[0], parameter.numel // parameter.shape[0]
    mine = _share(experts / degrees.expert, degrees.expert_shard, whole_rows=whole_rows)
    return mine * rest / degrees.expert_tensor


def _adamw_share(parameter: Parameter, degrees: _Degrees, optimizer: OptimizerSpec) -> Floats:
    """Bytes of AdamW's moments of a rank's share."""
    if parameter.stacked:
        elements, over = _stacked_share(parameter, degrees, whole_rows=True), degrees.expert_tensor
    else:
        elements, over = _dense_share(parameter, degrees, whole_rows=True), degrees.tensor
    last = len(parameter.shape) - 1
    columns = parameter.shape[-1] / (over if last and parameter.tensor_dim == last else np.ones(1))
    return elements / columns * _adamw_row_bytes(optimizer, len(parameter.shape), columns)


def _adamw_row_bytes(optimizer: OptimizerSpec, dims: int, columns: Floats) -> Floats:
    """Bytes of AdamW's moments of one row of a parameter, for each number of columns."""
    lengths, which = np.unique(np.ceil(columns), return_inverse=True)
    leading = (1,) * (dims - 1)
    rows = [adamw_state(optimizer, (*leading, int(length))) for length in lengths]
    sizes = np.array([float(sum(tensor.bytes for tensor in tensors)) for tensors in rows])
    return sizes[which].reshape(np.shape(columns))


@dataclass(frozen=True)
class OwnedMatrices:
    """Whole matrices that an optimizer gives to owners among the ranks of a stage: what the fullest and the busiest have."""

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
    """The matrices of owners where a rank has ``counts`` of each of ``KINDS``; see ``phalanx.model.facts.matrix_owners``."""
    degrees = (candidates.tensor, candidates.dense_shard, candidates.expert, candidates.expert_tensor)
    columns, row = distinct([*(count.astype(np.int64) for count in counts), *degrees])
    found = [
        _most_owned(optimizer, model, key[:4], *key[4:])
        for key in zip(*(c.tolist() for c in columns), strict=True)
    ]
    return OwnedMatrices(*(np.array(column, dtype=np.float64)[row] for column in zip(*found, strict=True)))


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
    """The fields of ``OwnedMatrices`` for one layout of one stage."""
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
    return np.ceil(rows / ranks) if whole_rows else rows / ranks

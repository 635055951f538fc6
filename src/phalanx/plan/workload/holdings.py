"""How many parameters of each kind a rank holds, for arrays of layouts.

The same division as ``phalanx.model.facts.holdings`` makes for one rank of one layout: a matrix over tensor ranks (experts over expert
ranks), then over the ranks that share state. These divide by rows, ``ceil(rows / ranks)`` each, as this project does, or one flat
buffer into equal parts (``Stack.shards``). The rank with the largest share is meant throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.model.facts.holdings import divided_dim
from phalanx.model.facts.shape import Parameter, is_mixture, parameters
from phalanx.plan.workload.architecture import KINDS
from phalanx.plan.workload.candidates import Candidates, Floats, Ints, at_last, distinct
from phalanx.run.spec import ModelSpec


@dataclass(frozen=True)
class Holdings:
    """Elements by kind of ``KINDS``, in the candidates' axes."""

    dense: tuple[Floats, ...]
    """Of one layer or end of the model, without routed experts, after tensor and before data-parallel ranks divide."""
    experts: tuple[Floats, ...]
    dense_share: tuple[Floats, ...]
    """The same, divided over ``Candidates.dense_shard`` ranks."""
    experts_share: tuple[Floats, ...]
    block: tuple[Floats, ...]
    """Of ``dense`` and ``experts`` together, what FSDP gathers as one block; the rest is gathered for a whole pass."""

    def rows(self, index: slice | Ints, length: int) -> Holdings:
        """Of the candidates at ``index`` of the last axis, which is ``length`` long."""

        def take(arrays: tuple[Floats, ...]) -> tuple[Floats, ...]:
            return tuple(at_last(array, index, length) for array in arrays)

        return Holdings(*(take(getattr(self, field.name)) for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class _Degrees:
    """What a layer's holdings depend on of a candidate."""

    tensor: Ints
    expert: Ints
    expert_tensor: Ints
    dense_shard: Ints
    expert_shard: Ints


def holdings(model: ModelSpec, candidates: Candidates, shards: Literal["flat", "rows"] = "rows") -> Holdings:
    """What one layer of each kind holds, where data-parallel ranks divide ``shards``."""
    values, row = distinct([getattr(candidates, field.name) for field in dataclasses.fields(_Degrees)])
    each = _holdings(model, _Degrees(*values), whole_rows=shards == "rows")

    def spread(arrays: tuple[Floats, ...]) -> tuple[Floats, ...]:
        return tuple(array[row] if array.size > 1 else array for array in arrays)

    return Holdings(*(spread(getattr(each, field.name)) for field in dataclasses.fields(each)))


def _holdings(model: ModelSpec, degrees: _Degrees, *, whole_rows: bool) -> Holdings:
    by_kind = [list(_of_kind(model, kind)) for kind in KINDS]
    ahead = [p for p in by_kind[KINDS.index("head")] if p.name.startswith("mtp.") and ".block." in p.name]
    return Holdings(
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
    )


def _of_kind(model: ModelSpec, kind: str) -> Iterator[Parameter]:
    """The parameters of one layer of a kind, or of an end of the model."""
    moe = model.moe
    if kind in ("dense", "mixture"):
        if kind == "mixture" and moe is None:
            return
        experts = dataclasses.replace(moe, first_dense=0, every=1) if moe and kind == "mixture" else None
        single = dataclasses.replace(model, layers=1, moe=experts, mtp_depth=0)
        yield from (p for p in parameters(single) if p.name.startswith("blocks."))
        return
    # Layers that predict further ahead are like the last layer.
    last = moe and dataclasses.replace(
        moe, first_dense=0, every=1 if is_mixture(model, model.layers - 1) else 2
    )
    ends = dataclasses.replace(model, layers=1, moe=last)
    for parameter in parameters(ends):
        top = parameter.name.partition(".")[0]
        if top != "blocks" and (top == "embedding") == (kind == "embedding"):
            yield parameter


def _sum(terms: Iterator[Floats]) -> Floats:
    return np.asarray(sum(terms, np.zeros(1)), dtype=np.float64)


def _dense(parameter: Parameter, degrees: _Degrees) -> Floats:
    rows, columns = _rows_and_columns(parameter, degrees)
    return rows * columns


def _dense_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    rows, columns = _rows_and_columns(parameter, degrees)
    return _share(rows, degrees.dense_shard, whole_rows=whole_rows) * columns


def _rows_and_columns(parameter: Parameter, degrees: _Degrees) -> tuple[Floats, Floats]:
    """Of what is left of a dense parameter after tensor ranks divided it."""
    rows, rest = float(parameter.shape[0]), float(parameter.numel // parameter.shape[0])
    dim = divided_dim(parameter)
    mine = np.ceil(rows / degrees.tensor) if dim == 0 else np.asarray(rows)
    return mine, rest / degrees.tensor if dim == 1 else np.asarray(rest)


def _stacked(parameter: Parameter, degrees: _Degrees) -> Floats:
    return np.asarray(parameter.numel / degrees.expert / degrees.expert_tensor)


def _stacked_share(parameter: Parameter, degrees: _Degrees, *, whole_rows: bool) -> Floats:
    experts, rest = parameter.shape[0], parameter.numel // parameter.shape[0]
    mine = _share(experts / degrees.expert, degrees.expert_shard, whole_rows=whole_rows)
    return mine * rest / degrees.expert_tensor


def _share(rows: Floats, ranks: Ints, *, whole_rows: bool) -> Floats:
    return np.ceil(rows / ranks) if whole_rows else rows / ranks

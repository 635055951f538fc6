"""Candidate layouts as arrays: one entry for each layout, or axes that broadcast against each other.

A search looks at millions of layouts. As objects they would cost a microsecond each before anything is computed; as a
structure of integer arrays every formula of the planner is written once, for one layout and for ten million alike. An array
may have length one along an axis that its field does not depend on: the whole space is then the product of the axes, and a
quantity is computed only over the axes it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.pipeline.schedules import ScheduleName
from phalanx.plan.workload.planned_layout import PlannedLayout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
"""Pipeline schedules; a candidate's ``schedule`` is an index into them."""


@dataclass(frozen=True)
class Precision:
    """A number format of training."""

    name: str
    matmul: str
    """Format of the operands of the blocks' matrix products, as ``Accelerator.flops`` names it."""
    activation_bytes: int
    """Bytes of an element of the residual stream and of what attention keeps."""
    operand_bytes: int
    """Bytes of an element of a kept operand of a matrix product, and of a token on its way to an expert."""


PRECISIONS = (
    Precision("bf16", "bf16", 2, 2),
    Precision("fp8", "fp8", 2, 1),
    Precision("fp4", "fp4", 2, 1),  # operands are kept in fp8 for the backward products' other orientation
    Precision("fp16", "fp16", 2, 2),
    Precision("fp32", "fp32", 4, 4),
)
"""A candidate's ``precision`` is an index into them."""

PARTS = (
    "norm",
    "projection",
    "latent_up",
    "core",
    "out",
    "residual",
    "widen",
    "activation",
    "down",
    "router",
    "dispatch",
    "expert_widen",
    "expert_activation",
    "expert_down",
    "combine",
)
"""Parts of a layer whose results may be kept or computed again."""
DENSE_PARTS = frozenset({"norm", "projection", "core", "out", "residual", "widen", "activation", "down"})
"""Those that a layer without experts and latent attention has."""


@dataclass(frozen=True)
class Recompute:
    """A recomputation mode: the parts of a layer that are computed again in backward rather than kept."""

    name: str
    parts: frozenset[str]
    halves: frozenset[str] = frozenset()
    """Parts of which one of two equal products is computed again, and the other's result kept."""

    def share(self, part: str) -> float:
        """Returns the share of a part's work and results that is computed again."""
        return 1.0 if part in self.parts else 0.5 if part in self.halves else 0.0

    @property
    def whole(self) -> bool:
        """True if nothing but a layer's input is kept."""
        return self.parts == frozenset(PARTS)


_POINTWISE = frozenset({"norm", "activation", "expert_activation"})
RECOMPUTE = (
    Recompute("none", frozenset()),
    Recompute("pointwise", _POINTWISE),
    Recompute("attention", frozenset({"core"})),
    Recompute("selective", _POINTWISE | {"widen", "expert_widen", "latent_up"}),
    Recompute(
        "experts",
        frozenset({"router", "dispatch", "expert_widen", "expert_activation", "expert_down", "combine"}),
    ),
    Recompute("full", frozenset(PARTS)),
)
"""A candidate's ``recompute`` is an index into them. "attention" is Korthikanti's selective recomputation (arXiv 2205.05198),
"selective" is that of ``phalanx.train.transforms.recompute``."""


_SWITCHES = ("offload_activations", "offload_optimizer", "sequence_parallel")


@dataclass(frozen=True)
class Candidates:
    """Layouts. Every field is an integer array; all broadcast to one shape.

    The rank order is tensor fastest, then context, shard, replicate, and pipeline slowest (``phalanx.run.layout``).
    """

    tensor: Ints
    context: Ints
    expert: Ints
    expert_tensor: Ints
    pipeline: Ints
    stages_per_rank: Ints
    replicate: Ints
    shard: Ints
    """Data-parallel ranks that state is sharded over, whatever ``zero`` says is sharded."""
    zero: Ints
    """0: nothing is sharded over data-parallel ranks; 1: the optimizer's state; 2: gradients too; 3: weights too."""
    micro_batch: Ints
    """Sequences of one forward pass."""
    recompute: Ints
    schedule: Ints
    precision: Ints
    offload_activations: Ints
    """1 where what backward needs waits in the host's memory."""
    offload_optimizer: Ints
    """1 where the optimizer's state lives in the host's memory."""
    sequence_parallel: Ints
    """1 where tensor ranks divide the sequence between matrix products; 0 where they repeat that work."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The common shape."""
        return np.broadcast_shapes(*(np.shape(getattr(self, field.name)) for field in fields(self)))

    @property
    def data(self) -> Ints:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> Ints:
        """All ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def dense_shard(self) -> Ints:
        """Ranks that the state of a stage's dense parameters is divided over."""
        return self.shard * self.context

    @property
    def expert_shard(self) -> Ints:
        """Ranks that the state of a stage's routed experts is divided over."""
        return self.shard * self.context * self.tensor // (self.expert * self.expert_tensor)

    def rows(self, index: slice | Ints | Bools) -> Candidates:
        """Those at ``index`` of the last axis."""
        length = self.shape[-1]
        return Candidates(
            **{field.name: at_last(getattr(self, field.name), index, length) for field in fields(self)}
        )

    def at(self, index: int, modes: Sequence[Recompute]) -> PlannedLayout:
        """The layout at a flat index of ``shape``; ``modes`` are what ``recompute`` indexes."""
        place = tuple(int(one) for one in np.unravel_index(index, self.shape))
        codes = {name: _pick(array, along, place) for name, array, along in self._varying}
        names = {
            "schedule": SCHEDULES[codes.pop("schedule")],
            "recompute": modes[codes.pop("recompute")].name,
            "precision": PRECISIONS[codes.pop("precision")].name,
        }
        switches = {name: bool(codes.pop(name)) for name in _SWITCHES}
        return PlannedLayout(**codes, **names, **switches)  # type: ignore[arg-type]

    @cached_property
    def _varying(self) -> list[tuple[str, Ints, tuple[int, ...]]]:
        """Each field with the axes along which it varies, counted from the last."""
        arrays = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [
            (name, array, tuple(axis for axis in range(-array.ndim, 0) if array.shape[axis] > 1))
            for name, array in arrays
        ]


Numbers = TypeVar("Numbers", Ints, Floats)


def at_last(array: Numbers, index: slice | Ints | Bools, length: int) -> Numbers:
    """The entries at ``index`` of the last axis, unless ``array`` is the same for all ``length`` of them."""
    if array.shape[-1] != length:
        return array
    if isinstance(index, slice) or index.dtype == bool:
        return array[..., index]
    return array.take(index, axis=-1)  # in half the time


_DENSE_CODES = 1 << 22
"""Codes up to here are counted in a table rather than sorted."""


def distinct(columns: Sequence[Ints]) -> tuple[tuple[Ints, ...], Ints]:
    """The combinations of non-negative ``columns``, which broadcast, that occur; and which of them each entry has."""
    first, row = occurrences(columns)
    wide = np.broadcast_arrays(*columns)
    return tuple(column.ravel()[first] for column in wide), row


def occurrences(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Where each combination of non-negative ``columns``, which broadcast, occurs first; and which of them each entry has."""
    code, span = np.zeros(1, dtype=np.int64), 1
    wide = np.broadcast_arrays(*columns)
    for column in columns:
        values, which = _numbered(column, int(column.max()) + 1)
        if span * len(values) > _DENSE_CODES:
            occurring, code = _numbered(code, span)
            span = len(occurring)
        code, span = code * len(values) + which, span * len(values)
    occurring, row = _numbered(np.broadcast_to(code, wide[0].shape), span)
    first = np.empty(len(occurring), dtype=np.int64)
    first[row.ravel()[::-1]] = np.arange(row.size - 1, -1, -1)
    return first, row


def _numbered(code: Ints, span: int) -> tuple[Ints, Ints]:
    """The values below ``span`` that occur, ascending, and which of them each entry is."""
    if span > max(_DENSE_CODES, code.size):
        values, which = np.unique(code, return_inverse=True)
        return values, which.reshape(code.shape)
    occurs = np.zeros(span, dtype=bool)
    occurs[code] = True
    number = np.cumsum(occurs) - 1
    return np.flatnonzero(occurs), number[code]


def _pick(array: Ints, along: tuple[int, ...], place: tuple[int, ...]) -> int:
    """The entry that broadcasting puts at ``place``, of an array that varies ``along`` some axes only."""
    flat = 0
    for axis in along:
        flat = flat * array.shape[axis] + place[axis]
    return int(array.item(flat))


def candidates_of(layouts: Sequence[PlannedLayout], modes: Sequence[Recompute]) -> Candidates:
    """``layouts`` as arrays along one axis; ``modes`` are what ``recompute`` indexes."""
    codes: dict[str, dict[str, int]] = {
        "schedule": {name: code for code, name in enumerate(SCHEDULES)},
        "recompute": {mode.name: code for code, mode in enumerate(modes)},
        "precision": {precision.name: code for code, precision in enumerate(PRECISIONS)},
    }

    def column(name: str) -> Ints:
        values = [getattr(layout, name) for layout in layouts]
        return np.array([codes[name][value] for value in values] if name in codes else values, dtype=np.int64)

    return Candidates(**{field.name: column(field.name) for field in fields(Candidates)})


def divisors(number: int, at_most: int | None = None) -> Iterator[int]:
    """The divisors of ``number``, ascending."""
    limit = number if at_most is None else min(number, at_most)
    return (d for d in range(1, limit + 1) if number % d == 0)

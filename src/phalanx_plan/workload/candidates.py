"""Layouts of the planner: one with names (``PlannedLayout``), many as arrays (``Candidates``), and their recomputation.

A search computes with arrays of codes (``Candidates``); its results are ``PlannedLayout``, whose
schedule, recomputation and precision are names. ``LAYOUT_FIELDS`` defines the name of a field in
``--layout``, ``--require`` and all printed text.

A search evaluates millions of layouts. As objects they would cost a microsecond each before anything is computed. As a
structure of integer arrays, one formula serves one layout and ten million. An array may have length one along an axis
that its field does not depend on. The complete space is then the product of the axes, and a quantity is computed only
over the axes it depends on.

The modes of ``Candidates`` are those of programs that offer a few. Other software lets its users name the recomputed
parts: Megatron Core its ``recompute_modules``, whose names are accepted beside the planner's own (``PARTS``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec

# One layout, and the names that users write for its fields.


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with all that is chosen beside the mesh. ``str()`` writes it in the words of ``--layout``."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    stages_per_rank: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicate: int = 1
    shard: int = 1
    """Data-parallel ranks that the state sharded by ``zero`` is divided over."""
    zero: int = 3
    """0: nothing is sharded over data-parallel ranks; 1: the optimizer's state; 2: gradients too; 3: weights too."""
    micro_batch: int = 1
    """Sequences of one forward pass."""
    schedule: ScheduleName = "1f1b"
    recompute: str = "none"
    """The name of one of the job's modes."""
    precision: str = "bf16"
    """The name of one of ``candidates.PRECISIONS``."""
    offload_activations: bool = False
    offload_optimizer: bool = False
    sequence_parallel: bool = True
    """True if tensor ranks divide the sequence between matrix products, rather than repeat that work."""

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def mesh(self) -> Layout:
        """The degrees of the mesh's axes."""
        return Layout(
            pipeline=self.pipeline,
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    def __str__(self) -> str:
        """One line in the words of ``--layout``, as in ``tp=2,dp=8,mbs=1,zero=3``.

        ``mbs`` and ``zero`` are always there; degrees only above 1, ``fsdp`` only with several replicas, the schedule
        only with a pipeline, and others only if they are not the default.
        """
        degrees = ("tensor", "context", "pipeline", "stages_per_rank", "expert", "expert_tensor", "data")
        shown: dict[str, object] = {name: getattr(self, name) for name in degrees if getattr(self, name) > 1}
        if self.replicate > 1:
            shown["shard"] = self.shard
        shown |= {"micro_batch": self.micro_batch, "zero": self.zero}
        if self.pipeline > 1:
            shown["schedule"] = self.schedule
        if self.recompute != "none":
            shown["recompute"] = self.recompute
        shown |= {name: 1 for name in ("offload_activations", "offload_optimizer") if getattr(self, name)}
        if self.precision != "bf16":
            shown["precision"] = self.precision
        if not self.sequence_parallel:
            shown["sequence_parallel"] = 0
        return ",".join(f"{_SHORT[name]}={value}" for name, value in shown.items())


@dataclass(frozen=True)
class LayoutField:
    """A field of a layout as users write it."""

    name: str
    short: str = ""
    """Its short name, accepted beside ``name``."""
    not_in_layout: str = ""
    """Reason why ``--layout`` rejects it."""
    not_in_require: str = ""
    """Reason why ``--require`` rejects it."""

    @property
    def shown(self) -> str:
        """Its name in printed text."""
        return self.short or self.name


_NOT_SEARCHED = "every layout that is looked at has the same"

LAYOUT_FIELDS = (
    LayoutField("tensor", "tp"),
    LayoutField("context", "cp"),
    LayoutField("pipeline", "pp"),
    LayoutField("stages_per_rank", "vpp"),
    LayoutField("expert", "ep"),
    LayoutField("expert_tensor", "etp"),
    LayoutField("data", "dp"),
    LayoutField("shard", "fsdp"),
    LayoutField("replicate", not_in_layout="it is dp / fsdp: give these"),
    LayoutField("micro_batch", "mbs"),
    LayoutField("ranks", "gpus"),
    LayoutField("zero"),
    LayoutField("offload_activations"),
    LayoutField("offload_optimizer"),
    LayoutField("schedule"),
    LayoutField("recompute"),
    LayoutField(
        "precision",
        not_in_require=f"{_NOT_SEARCHED}: set precision.compute or precision.matmul of the run file",
    ),
    LayoutField("sequence_parallel", not_in_require=_NOT_SEARCHED),
)
"""Every field of a layout that a user can name."""

_SHORT = {field.name: field.shown for field in LAYOUT_FIELDS}


def layout_field(word: str) -> LayoutField | None:
    """Return the field with the short or full name ``word``; ``None`` if there is none."""
    return next((field for field in LAYOUT_FIELDS if word in (field.name, field.shown)), None)


# Many: one entry for each layout, or axes that broadcast against each other.


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
"""Parts of a layer without experts and latent attention."""


@dataclass(frozen=True)
class Recompute:
    """A recomputation mode: the parts of a layer that are computed again in backward rather than kept."""

    name: str
    parts: frozenset[str]
    halves: frozenset[str] = frozenset()
    """Parts of which one of two equal products is computed again, and the other's result kept."""

    def share(self, part: str) -> float:
        """Return the share of a part's work and results that is computed again."""
        return 1.0 if part in self.parts else 0.5 if part in self.halves else 0.0


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
"selective" is that of ``phalanx.train.activations``."""


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
    """Data-parallel ranks that the state sharded by ``zero`` is divided over."""
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
        """Return the candidates at ``index`` of the last axis."""
        length = self.shape[-1]
        return Candidates(
            **{field.name: at_last(getattr(self, field.name), index, length) for field in fields(self)}
        )

    def at(self, index: int, modes: Sequence[Recompute]) -> PlannedLayout:
        """The layout at a flat index of ``shape``; ``modes`` are what ``recompute`` indexes."""
        place = tuple(int(index_on_axis) for index_on_axis in np.unravel_index(index, self.shape))
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
    """Return the entries at ``index`` of the last axis; ``array`` itself if that axis is not ``length`` long and so broadcasts."""
    if array.shape[-1] != length:
        return array
    if isinstance(index, slice) or index.dtype == bool:
        return array[..., index]
    return array.take(index, axis=-1)  # in half the time


_DENSE_CODES = 1 << 22
"""Codes up to here are counted in a table rather than sorted."""


def distinct(columns: Sequence[Ints]) -> tuple[tuple[Ints, ...], Ints]:
    """Return the combinations of non-negative ``columns``, which broadcast, that occur; and each entry's index among them."""
    first, row = occurrences(columns)
    wide = np.broadcast_arrays(*columns)
    return tuple(column.ravel()[first] for column in wide), row


def occurrences(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the first index of each combination of non-negative ``columns``, which broadcast; and each entry's index among them."""
    code, span = np.zeros(1, dtype=np.int64), 1
    wide = np.broadcast_arrays(*columns)
    for column in columns:
        values, codes = _numbered(column, int(column.max()) + 1)
        if span * len(values) > _DENSE_CODES:
            occurring, code = _numbered(code, span)
            span = len(occurring)
        code, span = code * len(values) + codes, span * len(values)
    occurring, row = _numbered(np.broadcast_to(code, wide[0].shape), span)
    first = np.empty(len(occurring), dtype=np.int64)
    first[row.ravel()[::-1]] = np.arange(row.size - 1, -1, -1)
    return first, row


def _numbered(code: Ints, span: int) -> tuple[Ints, Ints]:
    """Return the values below ``span`` that occur, ascending, and each entry's index among them."""
    if span > max(_DENSE_CODES, code.size):
        values, codes = np.unique(code, return_inverse=True)
        return values, codes.reshape(code.shape)
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
    """Convert ``layouts`` to arrays along one axis; ``modes`` are what ``recompute`` indexes.

    Raises ``KeyError`` for a mode that is not among them.
    """
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
    """The divisors of ``number``, ascending, up to ``at_most`` unless it is None."""
    limit = number if at_most is None else min(number, at_most)
    return (d for d in range(1, limit + 1) if number % d == 0)


# Recomputation of single parts of a layer, by the names that software gives them: ``core_attn+layernorm``.


MODULES: Mapping[str, frozenset[str]] = {
    "core_attn": frozenset({"core"}),
    "attention": frozenset({"core"}),
    "norm": frozenset({"norm"}),
    "rmsnorm": frozenset({"norm"}),
    "layernorm": frozenset({"norm"}),
    "act": frozenset({"activation", "expert_activation"}),
    "moe_act": frozenset({"expert_activation"}),
    "mlp": frozenset({"widen", "activation", "down"}),
    "mla_up_proj": frozenset({"latent_up"}),
    "shared_expert": frozenset({"widen", "activation", "down"}),
    "shared_experts": frozenset({"widen", "activation", "down"}),
    "moe": frozenset({"router", "dispatch", "expert_widen", "expert_activation", "expert_down", "combine"}),
}
"""Parts of a layer by the names of Megatron's ``recompute_modules`` (megatron/core/transformer/transformer_config.py)."""


_LATENT = frozenset({"latent_up"})


def mode_of_parts(text: str) -> Recompute:
    """Return the mode that recomputes the parts or modules named in ``text``, joined by "+".

    Raises ``ValueError`` with the valid names.
    """
    names = [name.strip() for name in text.split("+")]
    unknown = [name for name in names if name not in MODULES and name not in PARTS]
    if unknown:
        raise ValueError(
            f"recompute={text}: {unknown[0]!r} is no part of a layer: join some of {', '.join(dict.fromkeys((*MODULES, *PARTS)))} with +"
        )
    parts = frozenset(chain.from_iterable(MODULES.get(name, frozenset({name})) for name in names))
    return Recompute(text, parts)


def parts_of(model: ModelSpec) -> frozenset[str]:
    """The parts of a layer that some layer of ``model`` has."""
    parts = frozenset(PARTS) if model.moe is not None else DENSE_PARTS
    return parts | _LATENT if model.mla is not None else parts - _LATENT


def with_modes(modes: tuple[Recompute, ...], texts: Iterable[str]) -> tuple[Recompute, ...]:
    """Return ``modes`` with those that ``texts`` name by their parts."""
    names = {mode.name: mode for mode in modes}
    return (*modes, *(mode_of_parts(text) for text in dict.fromkeys(texts) if text not in names))

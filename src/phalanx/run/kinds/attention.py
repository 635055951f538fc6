"""The contract of a kind of attention, and the choice of the kind that a model has.

A kind is a file of this folder with the functions of ``AttentionKind``; ``phalanx.model.transformer`` has the
``nn.Module`` that computes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from phalanx.run.fields import Problem
from phalanx.run.kinds import grouped_attention, latent_attention
from phalanx.run.kinds.operations import AttentionCore, Operation, Parameter
from phalanx.run.spec import ModelSpec, RopeScalingSpec


class AttentionKind(Protocol):
    """All that is known of a kind of attention without building it. But for the first five functions, models are resolved."""

    TITLE: str
    """Its name in messages."""
    OWN_FIELDS: tuple[str, ...]
    """Fields of ``[model]`` that other kinds have not got, and refuse."""

    def problems(self, model: ModelSpec) -> Iterator[Problem]:
        """Yields the problems among a model's fields."""

    def head_dim(self, model: ModelSpec) -> int:
        """Width of a head's query and key."""

    def tensor_sizes(self, model: ModelSpec) -> Iterator[tuple[str, int]]:
        """Fields, with their values, that the number of tensor ranks must divide."""

    def key_heads(self, model: ModelSpec) -> int:
        """Key and value heads, each of which several tensor ranks may hold alike."""

    def undivided(self, model: ModelSpec) -> Iterator[tuple[str, Problem]]:
        """Axes ("tensor", "context", "pipeline") whose degree must be 1, with the reason."""

    def parts(self, model: ModelSpec) -> Iterator[Parameter]:
        """Its parameters, in the order and under the names of its module."""

    def core(self, model: ModelSpec) -> AttentionCore:
        """The heads that compute scores and weighted values."""

    def operations(self, model: ModelSpec) -> Sequence[Operation]:
        """Its operations, from the normalized input to the sum over tensor ranks."""

    def rotated_width(self, model: ModelSpec) -> int:
        """Elements of a head that are rotated to their position."""

    def cache_row(self, model: ModelSpec) -> tuple[int, int, int]:
        """The row that the key-value cache keeps of a token: heads, and the widths of a head's two tensors."""

    def tiny(self, model: ModelSpec, tensor: int) -> ModelSpec:
        """The same with the smallest widths that ``tensor`` ranks can divide."""


_KINDS: tuple[AttentionKind, ...] = (grouped_attention, latent_attention)


def attention_kind(model: ModelSpec) -> AttentionKind:
    """The kind of attention of ``model``."""
    return grouped_attention if model.mla is None else latent_attention


def _factor_problems(scaling: RopeScalingSpec, frequencies: int) -> Iterator[Problem]:
    """Yields the problems of LongRoPE's factors, of which there is one for each frequency, or with other methods none."""
    expected = frequencies if scaling.kind == "longrope" else 0
    for name, factors in (("short_factors", scaling.short_factors), ("long_factors", scaling.long_factors)):
        if len(factors) != expected or not all(factor > 0 for factor in factors):
            yield Problem(
                f"model.rope_scaling.{name}",
                f"{len(factors)} factors, the smallest {min(factors, default=0):g}, for {frequencies} frequencies",
                'one above 0 for each frequency with kind = "longrope", none with others',
                ("model.rope_scaling.kind", "model.rope_scaling", "model.head_dim", "model.rope_fraction"),
            )


def attention_problems(model: ModelSpec) -> Iterator[Problem]:
    """Yields the problems of the kind that ``model`` has, fields of other kinds among them."""
    mine = attention_kind(model)
    yield from mine.problems(model)
    if model.rope_scaling is not None:
        yield from _factor_problems(model.rope_scaling, mine.rotated_width(model) // 2)
    defaults = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    chosen_by = tuple(f"model.{name}" for name in mine.OWN_FIELDS if getattr(model, name) != defaults[name])
    for name in (name for kind in _KINDS if kind is not mine for name in kind.OWN_FIELDS):
        if getattr(model, name) != defaults[name]:
            remedy = f"set it to {json.dumps(defaults[name])}"
            yield Problem(f"model.{name}", f"{mine.TITLE} has none", remedy, chosen_by)

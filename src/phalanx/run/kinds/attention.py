"""The interface of a kind of attention, and the choice of a model's kind.

A kind is a file in this folder with the functions of ``AttentionKind``. ``phalanx.model.transformer`` selects the ``nn.Module`` that computes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from phalanx.run.fields import Problem
from phalanx.run.kinds import grouped_attention, latent_attention
from phalanx.run.kinds.operations import AttentionCore, Operation, Parameter
from phalanx.run.spec import ModelSpec


class AttentionKind(Protocol):
    """Facts about a kind of attention without building it. Models are resolved, except for the first five functions."""

    TITLE: str
    """Its name in messages."""
    OWN_FIELDS: tuple[str, ...]
    """Fields of ``[model]`` that only this kind has; other kinds refuse them."""

    def problems(self, model: ModelSpec) -> Iterator[Problem]:
        """Yield the problems among a model's fields."""

    def head_dim(self, model: ModelSpec) -> int:
        """Width of a head's query and key."""

    def tensor_sizes(self, model: ModelSpec) -> Iterator[tuple[str, int]]:
        """Fields, with their values, that the number of tensor ranks must divide."""

    def key_heads(self, model: ModelSpec) -> int:
        """Number of key and value heads. Several tensor ranks may hold the same ones."""

    def undivided(self, model: ModelSpec) -> Iterator[tuple[str, Problem]]:
        """Axes ("tensor", "context", "pipeline") whose degree must be 1, with the reason."""

    def parts(self, model: ModelSpec) -> Iterator[Parameter]:
        """Return its parameters, in the order and under the names of its module."""

    def core(self, model: ModelSpec) -> AttentionCore:
        """The heads that compute scores and weighted values."""

    def operations(self, model: ModelSpec) -> Sequence[Operation]:
        """Return its operations, from the normalized input to the sum over tensor ranks."""

    def rotated_width(self, model: ModelSpec) -> int:
        """Elements of a head that are rotated to their position."""

    def cache_row(self, model: ModelSpec) -> tuple[int, int, int]:
        """Shape of a token's row in the key-value cache: heads, and the widths of a head's two tensors."""

    def tiny(self, model: ModelSpec, tensor: int) -> ModelSpec:
        """The same model with the smallest widths that ``tensor`` ranks can divide."""


_KINDS: tuple[AttentionKind, ...] = (grouped_attention, latent_attention)


def attention_kind(model: ModelSpec) -> AttentionKind:
    """Return the kind of attention of ``model``."""
    return grouped_attention if model.mla is None else latent_attention


def attention_problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the problems of the model's kind, of LongRoPE factors that do not fit its frequencies, and of fields of
    other kinds that are not at their default.
    """
    own_kind = attention_kind(model)
    yield from own_kind.problems(model)
    if (scaling := model.rope_scaling) is not None:
        # LongRoPE has one factor for each frequency, other methods have none.
        frequencies = own_kind.rotated_width(model) // 2
        expected = frequencies if scaling.kind == "longrope" else 0
        for name in ("short_factors", "long_factors"):
            factors = getattr(scaling, name)
            if len(factors) != expected or not all(factor > 0 for factor in factors):
                yield Problem(
                    f"model.rope_scaling.{name}",
                    f"{len(factors)} factors, the smallest {min(factors, default=0):g}, for {frequencies} frequencies",
                    'one above 0 for each frequency with kind = "longrope", none with others',
                    (
                        "model.rope_scaling.kind",
                        "model.rope_scaling",
                        "model.head_dim",
                        "model.rope_fraction",
                    ),
                )
    defaults = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    chosen_by = tuple(
        f"model.{name}" for name in own_kind.OWN_FIELDS if getattr(model, name) != defaults[name]
    )
    for name in (name for kind in _KINDS if kind is not own_kind for name in kind.OWN_FIELDS):
        if getattr(model, name) != defaults[name]:
            remedy = f"set it to {json.dumps(defaults[name])}"
            yield Problem(f"model.{name}", f"{own_kind.TITLE} has none", remedy, chosen_by)

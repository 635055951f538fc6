"""The rules of a model's fields that concern all its layers together, and the parallel degrees that they allow.

Everything here looks at the kinds of layers that a model has, and at no field by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.run.kinds import ends, feed_forward, mixture, prediction_ahead
from phalanx.run.kinds.attention import attention_kind, attention_problems
from phalanx.run.problems import Problem
from phalanx.run.spec import ModelSpec

_NO_LAYER = "rope_scaling"
"""The one section of a model that describes no layer."""


def resolve(spec: ModelSpec, vocab_size: int = 0) -> ModelSpec:
    """The same model with every dimension written out (no zeros that stand for a rule)."""
    ffn_dim, moe = spec.ffn_dim or feed_forward.default_width(spec), spec.moe
    return dataclasses.replace(
        spec,
        kv_heads=spec.kv_heads or spec.heads,
        head_dim=attention_kind(spec).head_dim(spec),
        ffn_dim=ffn_dim,
        vocab_size=spec.vocab_size or vocab_size,
        moe=None if moe is None else dataclasses.replace(moe, ffn_dim=moe.ffn_dim or ffn_dim),
    )


def problems(model: ModelSpec) -> Iterator[Problem]:
    """Combinations of a model's fields that cannot be."""
    yield from attention_problems(model)
    yield from mixture.problems(model)


def described_layers(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Fields that ask for a kind of layer that only this project's transformer has, with how to take them back."""
    for field in dataclasses.fields(model):
        if field.name != _NO_LAYER and dataclasses.is_dataclass(getattr(model, field.name)):
            remedy = (
                "leave the table out; a model of your own may hold such layers of its own, whole on a rank"
            )
            yield f"model.{field.name}", remedy
    if prediction_ahead.depths(model):
        yield "model.mtp_depth", "set it to 0"
    if model.logit_cap:
        yield "model.logit_cap", "set it to 0; logits are the product of norm and head"


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Fields, with their values, that the number of tensor ranks must divide."""
    yield from attention_kind(model).tensor_sizes(model)
    yield from feed_forward.tensor_sizes(model)
    yield from mixture.tensor_sizes(model)


def shares_key_heads(model: ModelSpec, tensor: int) -> bool:
    """True if tensor ranks can divide the key and value heads, or if equally many ranks can hold each of them."""
    heads = attention_kind(model).key_heads(model)
    return heads % tensor == 0 or tensor % heads == 0


def key_copies(model: ModelSpec, tensor: int) -> int:
    """Tensor ranks that hold the same key and value heads."""
    return max(1, tensor // attention_kind(model).key_heads(model))


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Axes ("tensor", "context", "pipeline") whose degree must be 1 for this model, with the reason."""
    yield from ends.undivided(model)
    yield from attention_kind(model).undivided(model)
    yield from prediction_ahead.undivided(model)


def tiny(model: ModelSpec, tensor: int) -> ModelSpec:
    """A resolved model with the same layers and the smallest widths that ``tensor`` ranks can divide."""
    small = mixture.tiny(attention_kind(model).tiny(model, tensor), tensor)
    return dataclasses.replace(small, dim=16, ffn_dim=8 * tensor, vocab_size=8 * tensor)

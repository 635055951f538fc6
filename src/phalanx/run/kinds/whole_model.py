"""Rules for a model's fields that concern all its layers, and the parallel degrees that they allow.

The rules use only the model's kinds of layers, and no single fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.run.fields import Problem
from phalanx.run.kinds import block, feed_forward
from phalanx.run.kinds.attention import attention_kind, attention_problems
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec, OptimizerSpec

_NO_LAYER = "rope_scaling"
"""The one section of a model that describes no layer."""


def resolve(spec: ModelSpec, vocab_size: int = 0) -> ModelSpec:
    """Return the same model with all dimensions written out, without zeros for defaults. ``vocab_size`` is used only
    if the model has none.
    """
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
    yield from feed_forward.problems(model)


def described_layers(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield fields that are set and select a layer that only this project's transformer has, with a remedy."""
    for field in dataclasses.fields(model):
        if field.name != _NO_LAYER and dataclasses.is_dataclass(getattr(model, field.name)):
            remedy = (
                "leave the table out; a model of your own may hold such layers of its own, whole on a rank"
            )
            yield f"model.{field.name}", remedy
    if block.prediction_depths(model):
        yield "model.mtp_depth", "set it to 0"
    if model.logit_cap:
        yield "model.logit_cap", "set it to 0; logits are the product of norm and head"


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Fields, with their values, that the number of tensor ranks must divide."""
    yield from attention_kind(model).tensor_sizes(model)
    yield from feed_forward.tensor_sizes(model)


def shares_key_heads(model: ModelSpec, tensor: int) -> bool:
    """True if tensor ranks can divide the key and value heads, or if equally many ranks can hold each of them."""
    heads = attention_kind(model).key_heads(model)
    return heads % tensor == 0 or tensor % heads == 0


def key_copies(model: ModelSpec, tensor: int) -> int:
    """Tensor ranks that hold the same key and value heads."""
    return max(1, tensor // attention_kind(model).key_heads(model))


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Axes ("tensor", "context", "pipeline") whose degree must be 1 for this model, with the reason."""
    yield from block.undivided(model)
    yield from attention_kind(model).undivided(model)
    yield from block.predictions_undivided(model)


def tiny(model: ModelSpec, tensor: int) -> ModelSpec:
    """A resolved model with the same layers and the smallest widths that ``tensor`` ranks can divide."""
    small = feed_forward.tiny(attention_kind(model).tiny(model, tensor), tensor)
    return dataclasses.replace(small, dim=16, ffn_dim=8 * tensor, vocab_size=8 * tensor)


# The blocks of the optimizer's 8-bit state, and the tensor degrees that cut through one.
#
# An int8 moment has one scale for ``INT8_BLOCK`` elements of a row. If tensor ranks divide the rows of a matrix, each must hold
# complete blocks, because two ranks cannot share a scale. The layout's check, the planner's search and the optimizer use this rule.


INT8_BLOCK = 64
"""Elements with a common scale: few enough to divide what tensor ranks hold of a row."""


def cut_by_tensor_ranks(
    model: ModelSpec, optimizer: OptimizerSpec, tensor: int, *, stacked: bool = False
) -> Parameter | None:
    """Return the first parameter of a block of a resolved model of whose int8 state ``tensor`` ranks would cut a block; ``None`` if
    there is none.

    With ``stacked``, of experts' matrices, which ``parallel.expert_tensor`` ranks divide; else of all others.
    """
    if optimizer.name != "adamw" or optimizer.state != "int8" or tensor == 1:
        return None
    kinds = sorted({is_mixture(model, layer) for layer in range(model.layers)})
    parts = (part for mixed in kinds for part in block.parts(model, mixed=mixed))
    cut = (part for part in parts if part.stacked == stacked and _is_cut(part, tensor))
    return next(cut, None)


def _is_cut(part: Parameter, tensor: int) -> bool:
    """True if ranks divide the parameter's last dimension, but not into whole blocks; vectors are kept in fp32."""
    last = len(part.shape) - 1
    return last > 0 and part.tensor_dim == last and part.shape[-1] // tensor % INT8_BLOCK != 0

"""The dense feed-forward layer, gated or plain; its module is ``phalanx.model.layers.dense``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.run.kinds.operations import (
    Activation,
    LayerExchange,
    MatrixProduct,
    Operation,
    Parameter,
    by_name,
    linear,
    under,
)
from phalanx.run.spec import ModelSpec


def default_width(model: ModelSpec) -> int:
    """Return the inner width for ``ffn_dim`` 0."""
    # Three matrices of 8/3 dim hold as much as two of 4 dim (Shazeer, arXiv 2002.05202).
    inner = 8 * model.dim / 3 if is_gated(model) else 4 * model.dim
    return 64 * math.ceil(inner / 64)


def is_gated(model: ModelSpec) -> bool:
    """Return True if the activation multiplies with a gate, which has another matrix."""
    return model.ffn != "gelu"


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """The inner width; one that a model leaves open can be divided by any usual number of ranks."""
    if model.ffn_dim:
        yield "model.ffn_dim", model.ffn_dim


def parts(model: ModelSpec, inner: int) -> Iterator[Parameter]:
    """Yield the matrices of a layer ``inner`` elements wide, divided there."""
    if is_gated(model):
        yield from under("gate", linear(model.dim, inner, model.ffn_bias, tensor_dim=0))
    yield from under("up", linear(model.dim, inner, model.ffn_bias, tensor_dim=0))
    yield from under("down", linear(inner, model.dim, model.ffn_bias, "output", tensor_dim=1))


def operations(model: ModelSpec, inner: int) -> tuple[Operation, ...]:
    """Gate and values by one product, the activation, and the product back."""
    weights = by_name(parts(model, inner))
    widen = tuple(weights[name] for name in ("gate.weight", "up.weight") if name in weights)
    return (
        LayerExchange("widen", "gather", model.dim),
        MatrixProduct("widen", "tokens", widen, kept=True),
        Activation("activation", "tokens", inner, is_gated(model), "tensor"),
        MatrixProduct("down", "tokens", (weights["down.weight"],)),
        LayerExchange("down", "scatter", model.dim),
    )

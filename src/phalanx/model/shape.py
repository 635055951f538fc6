"""Fills in what a ``ModelSpec`` leaves open, and lists every parameter with its shape.

The list is the one place where a parameter's name, shape and kind are derived from a description without
building anything, so that counting a 405 B model takes no memory and no torch. A test holds it against the
module in ``phalanx.model.transformer``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.run.spec import ModelSpec

Kind = Literal["embedding", "matrix", "output", "norm", "bias"]


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name in the module, its shape, and what kind of thing it is.

    ``output`` is a matrix that writes into the residual stream; it starts out smaller.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def resolve(spec: ModelSpec, vocab_size: int = 0) -> ModelSpec:
    """The same model with every dimension written out (no zeros that stand for a rule)."""
    return dataclasses.replace(
        spec,
        kv_heads=spec.kv_heads or spec.heads,
        head_dim=spec.head_dim or spec.dim // spec.heads,
        ffn_dim=spec.ffn_dim or _ffn_dim(spec),
        vocab_size=spec.vocab_size or vocab_size,
    )


def _ffn_dim(spec: ModelSpec) -> int:
    # Three matrices of 8/3 dim hold as much as two of 4 dim (Shazeer, arXiv 2002.05202).
    inner = 8 * spec.dim / 3 if spec.ffn == "swiglu" else 4 * spec.dim
    return 64 * math.ceil(inner / 64)


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of a resolved model, in the order in which the module registers them."""
    yield Parameter("embedding.weight", (spec.vocab_size, spec.dim), "embedding")
    for layer in range(spec.layers):
        yield from _block(spec, f"blocks.{layer}")
    yield Parameter("norm.weight", (spec.dim,), "norm")
    if not spec.tie_embeddings:
        yield Parameter("head.weight", (spec.vocab_size, spec.dim), "matrix")


def _block(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield Parameter(f"{prefix}.attention_norm.weight", (spec.dim,), "norm")
    attention = f"{prefix}.attention"
    yield from _linear(f"{attention}.query", spec.dim, queries, spec.attention_bias)
    yield from _linear(f"{attention}.key", spec.dim, keys, spec.attention_bias)
    yield from _linear(f"{attention}.value", spec.dim, keys, spec.attention_bias)
    yield from _linear(f"{attention}.output", queries, spec.dim, spec.attention_bias, "output")
    if spec.qk_norm:
        yield Parameter(f"{attention}.query_norm.weight", (spec.head_dim,), "norm")
        yield Parameter(f"{attention}.key_norm.weight", (spec.head_dim,), "norm")
    yield Parameter(f"{prefix}.ffn_norm.weight", (spec.dim,), "norm")
    ffn = f"{prefix}.ffn"
    if spec.ffn == "swiglu":
        yield from _linear(f"{ffn}.gate", spec.dim, spec.ffn_dim, spec.ffn_bias)
    yield from _linear(f"{ffn}.up", spec.dim, spec.ffn_dim, spec.ffn_bias)
    yield from _linear(f"{ffn}.down", spec.ffn_dim, spec.dim, spec.ffn_bias, "output")


def _linear(
    name: str, inputs: int, outputs: int, bias: bool, kind: Literal["matrix", "output"] = "matrix"
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (outputs, inputs), kind)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), "bias")

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

from phalanx.run.factory import FactoryError
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

Kind = Literal["embedding", "matrix", "output", "filter", "router", "norm", "bias", "balance"]


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name in the module, its shape, and what kind of thing it is.

    ``output`` is a matrix that writes into the residual stream; it starts out smaller. ``filter`` is a weight of more than two
    dimensions in a user's own model. ``balance`` is the bias by which a
    router's load is evened out: state of the model that no gradient changes.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    stacked: bool = False
    """Whether it is a stack of matrices ``(experts, rows, columns)``, each of its own, rather than one."""
    tensor_dim: int | None = None
    """The dimension that the tensor axis divides (of a stack, the axis of experts' matrices); ``None`` if all ranks hold it alike."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def resolve(spec: ModelSpec, vocab_size: int = 0) -> ModelSpec:
    """The same model with every dimension written out (no zeros that stand for a rule)."""
    ffn_dim, mla, moe = spec.ffn_dim or _ffn_dim(spec), spec.mla, spec.moe
    head_dim = spec.head_dim or spec.dim // spec.heads
    return dataclasses.replace(
        spec,
        kv_heads=spec.kv_heads or spec.heads,
        head_dim=head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim,
        ffn_dim=ffn_dim,
        vocab_size=spec.vocab_size or vocab_size,
        moe=None if moe is None else dataclasses.replace(moe, ffn_dim=moe.ffn_dim or ffn_dim),
    )


def _ffn_dim(spec: ModelSpec) -> int:
    # Three matrices of 8/3 dim hold as much as two of 4 dim (Shazeer, arXiv 2002.05202).
    inner = 8 * spec.dim / 3 if spec.ffn == "swiglu" else 4 * spec.dim
    return 64 * math.ceil(inner / 64)


def is_mixture(spec: ModelSpec, layer: int) -> bool:
    """Whether the feed-forward layer of layer ``layer``, from 0, is a mixture of experts."""
    moe = spec.moe
    if moe is None or layer < moe.first_dense:
        return False
    return (layer - moe.first_dense + 1) % moe.every == 0


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of a resolved model, in the order in which the module registers them.

    Raises ``FactoryError`` for a user's own model, whose parameters are known only once it is built.
    """
    if spec.factory:
        raise FactoryError(
            f"{spec.factory} is a model of your own: its parameters and operations are known only to training, which builds "
            "it; plans, `phalanx show` and exports to other software are for the transformer that [model] describes"
        )
    yield Parameter("embedding.weight", (spec.vocab_size, spec.dim), "embedding", tensor_dim=0)
    for layer in range(spec.layers):
        yield from _block(spec, layer, f"blocks.{layer}")
    yield Parameter("norm.weight", (spec.dim,), "norm")
    if not spec.tie_embeddings:
        yield Parameter("head.weight", (spec.vocab_size, spec.dim), "matrix", tensor_dim=0)
    for depth in range(spec.mtp_depth):
        yield from _prediction_ahead(spec, f"mtp.{depth}")


def buffers(spec: ModelSpec) -> Iterator[Parameter]:
    """What else belongs to the state of a resolved model: the balance bias of each router, fp32, in their order."""
    if spec.moe is not None and spec.moe.balance_bias:
        blocks = [(layer, f"blocks.{layer}") for layer in range(spec.layers)]
        ahead = [(spec.layers - 1, f"mtp.{depth}.block") for depth in range(spec.mtp_depth)]
        for layer, prefix in (*blocks, *ahead):
            if is_mixture(spec, layer):
                yield Parameter(f"{prefix}.ffn.router.bias", (spec.moe.experts,), "balance")


def _prediction_ahead(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.hidden_norm.weight", (spec.dim,), "norm")
    yield Parameter(f"{prefix}.embedding_norm.weight", (spec.dim,), "norm")
    yield from _linear(f"{prefix}.projection", 2 * spec.dim, spec.dim, bias=False, tensor_dim=None)
    yield from _block(spec, spec.layers - 1, f"{prefix}.block")
    yield Parameter(f"{prefix}.norm.weight", (spec.dim,), "norm")


def _block(spec: ModelSpec, layer: int, prefix: str) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.attention_norm.weight", (spec.dim,), "norm")
    if spec.mla is None:
        yield from _attention(spec, f"{prefix}.attention")
    else:
        yield from _latent_attention(spec, spec.mla, f"{prefix}.attention")
    yield Parameter(f"{prefix}.ffn_norm.weight", (spec.dim,), "norm")
    if spec.moe is not None and is_mixture(spec, layer):
        yield from _mixture(spec, spec.moe, f"{prefix}.ffn")
    else:
        yield from _feed_forward(spec, spec.ffn_dim, f"{prefix}.ffn")


def _attention(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    queries, keys, bias = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.attention_bias
    yield from _linear(f"{prefix}.query", spec.dim, queries, bias, tensor_dim=0)
    yield from _linear(f"{prefix}.key", spec.dim, keys, bias, tensor_dim=0)
    yield from _linear(f"{prefix}.value", spec.dim, keys, bias, tensor_dim=0)
    yield from _linear(f"{prefix}.output", queries, spec.dim, bias, "output", tensor_dim=1)
    if spec.qk_norm:
        yield Parameter(f"{prefix}.query_norm.weight", (spec.head_dim,), "norm")
        yield Parameter(f"{prefix}.key_norm.weight", (spec.head_dim,), "norm")


def _latent_attention(spec: ModelSpec, mla: MlaSpec, prefix: str) -> Iterator[Parameter]:
    queries = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.query_rank:
        yield from _linear(f"{prefix}.query_down", spec.dim, mla.query_rank, bias=False, tensor_dim=None)
        yield Parameter(f"{prefix}.query_latent_norm.weight", (mla.query_rank,), "norm")
        yield from _linear(f"{prefix}.query_up", mla.query_rank, queries, bias=False, tensor_dim=0)
    else:
        yield from _linear(f"{prefix}.query", spec.dim, queries, bias=False, tensor_dim=0)
    yield from _linear(
        f"{prefix}.kv_down", spec.dim, mla.kv_rank + mla.rope_head_dim, bias=False, tensor_dim=None
    )
    yield Parameter(f"{prefix}.kv_latent_norm.weight", (mla.kv_rank,), "norm")
    expanded = spec.heads * (mla.nope_head_dim + mla.value_head_dim)
    yield from _linear(f"{prefix}.kv_up", mla.kv_rank, expanded, bias=False, tensor_dim=0)
    yield from _linear(
        f"{prefix}.output", spec.heads * mla.value_head_dim, spec.dim, False, "output", tensor_dim=1
    )


def _feed_forward(spec: ModelSpec, inner: int, prefix: str) -> Iterator[Parameter]:
    if spec.ffn == "swiglu":
        yield from _linear(f"{prefix}.gate", spec.dim, inner, spec.ffn_bias, tensor_dim=0)
    yield from _linear(f"{prefix}.up", spec.dim, inner, spec.ffn_bias, tensor_dim=0)
    yield from _linear(f"{prefix}.down", inner, spec.dim, spec.ffn_bias, "output", tensor_dim=1)


def _mixture(spec: ModelSpec, moe: MoeSpec, prefix: str) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.router.weight", (moe.experts, spec.dim), "router")
    wide, narrow = (moe.experts, moe.ffn_dim, spec.dim), (moe.experts, spec.dim, moe.ffn_dim)
    if spec.ffn == "swiglu":
        yield Parameter(f"{prefix}.experts.gate", wide, "matrix", stacked=True, tensor_dim=1)
    yield Parameter(f"{prefix}.experts.up", wide, "matrix", stacked=True, tensor_dim=1)
    yield Parameter(f"{prefix}.experts.down", narrow, "output", stacked=True, tensor_dim=2)
    if moe.shared:
        yield from _feed_forward(spec, moe.shared * moe.ffn_dim, f"{prefix}.shared")


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    bias: bool,
    kind: Literal["matrix", "output"] = "matrix",
    *,
    tensor_dim: int | None,
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (outputs, inputs), kind, tensor_dim=tensor_dim)
    if bias:
        # Where ranks divide the inputs, their results are added up, and the bias is alike on all of them.
        yield Parameter(f"{name}.bias", (outputs,), "bias", tensor_dim=0 if tensor_dim == 0 else None)

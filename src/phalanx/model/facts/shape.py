"""Fills in what a ``ModelSpec`` leaves open, and lists every parameter: the table of parts of each kind of layer.

The table is the one place where a parameter's name, shape, kind, division over tensor ranks, FSDP unit and products per token
are derived from a description without building anything, so that counting a 405 B model takes no memory and no torch. Counts,
FLOP, stages, what ranks hold, the tensor axis's division of the modules, collectives and the planner's holdings follow from
it. A test holds it against the module in ``phalanx.model.transformer``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.run.factory import FactoryError
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

ParameterKind = Literal["embedding", "matrix", "output", "filter", "router", "norm", "bias", "balance"]

Section = Literal["embedding", "block", "end", "ahead"]
"""The section of the model: the embedding, a block, final norm and output projection, a prediction further ahead."""


@dataclass(frozen=True)
class Parameter:
    """One row of the table of parts: a parameter, and what counting, holding and dividing it follow from.

    ``output`` is a matrix that writes into the residual stream; it starts out smaller. ``filter`` is a weight of more than two
    dimensions in a user's own model. ``balance`` is the bias by which a
    router's load is evened out: state of the model that no gradient changes.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    stacked: bool = False
    """True for a stack of matrices ``(experts, rows, columns)``, each of its own, rather than one."""
    tensor_dim: int | None = None
    """The dimension that the tensor axis divides (of a stack, the axis of experts' matrices); ``None`` if all ranks hold it alike."""
    products: int = 0
    """Number of times that the forward pass of a token multiplies with it."""
    per_token: int = 0
    """Number of a stack's matrices that one token is multiplied with."""
    section: Section = "block"
    layer: int = 0
    """The layer, from 0, of a parameter of a block."""
    unit: str = ""
    """FSDP gathers the parameters of a unit together; those without one, at the ends of the model, with the whole pass."""

    @property
    def met(self) -> int:
        """Elements that one token meets: of a stack, those of the experts that it is sent to."""
        return self.numel // self.shape[0] * self.per_token if self.stacked else self.numel

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
    """True if the feed-forward layer of layer ``layer``, from 0, is a mixture of experts."""
    moe = spec.moe
    if moe is None or layer < moe.first_dense:
        return False
    return (layer - moe.first_dense + 1) % moe.every == 0


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of a resolved model, in the order in which the module registers them.

    Raises ``FactoryError`` for a user's own model, whose parameters are known only once it is built.
    """
    _refuse_custom(spec)
    head, *rest = outside_blocks(spec)
    yield head
    # Layers of a kind differ by name alone: each kind is derived once.
    kinds = {kind: _block(spec, mixture=kind) for kind in {*_mixtures(spec)}}
    for layer, kind in enumerate(_mixtures(spec)):
        yield from _block_at(f"blocks.{layer}", layer, kinds[kind])
    yield from rest


def numbered_parameters(spec: ModelSpec) -> Iterator[tuple[Parameter, int]]:
    """The parameters of ``parameters``, those of blocks of one kind listed once; and how many there are of each."""
    _refuse_custom(spec)
    yield from ((part, 1) for part in outside_blocks(spec))
    for kind, blocks in Counter(_mixtures(spec)).items():
        yield from ((part, blocks) for part in block_parts(spec, "blocks", 0, mixture=kind))


def _mixtures(spec: ModelSpec) -> list[bool]:
    """For each layer, True if it is a mixture of experts."""
    return [is_mixture(spec, layer) for layer in range(spec.layers)]


def _refuse_custom(spec: ModelSpec) -> None:
    if spec.factory:
        raise FactoryError(
            f"{spec.factory} is a model of your own: its parameters and operations are known only to training, which builds "
            "it; plans, `phalanx show` and exports to other software are for the transformer that [model] describes"
        )


def outside_blocks(spec: ModelSpec) -> Iterator[Parameter]:
    """The parameters of both ends of the model: embedding, final norm, output projection, predictions ahead."""
    # The output projection multiplies once for the main model, and once more for each prediction ahead.
    shape, products = (spec.vocab_size, spec.dim), 1 + spec.mtp_depth
    tied = products if spec.tie_embeddings else 0
    yield Parameter("embedding.weight", shape, "embedding", tensor_dim=0, products=tied, section="embedding")
    yield from _at("norm", _norm(spec.dim), section="end")
    if not spec.tie_embeddings:
        yield Parameter("head.weight", shape, "matrix", tensor_dim=0, products=products, section="end")
    for depth in range(spec.mtp_depth):
        yield from _prediction_ahead(spec, f"mtp.{depth}")


def _prediction_ahead(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    """One depth of multi-token prediction; its block is like the model's last."""
    last = spec.layers - 1
    parts = (
        *_at(f"{prefix}.hidden_norm", _norm(spec.dim)),
        *_at(f"{prefix}.embedding_norm", _norm(spec.dim)),
        *_at(f"{prefix}.projection", _linear(2 * spec.dim, spec.dim, bias=False)),
        *block_parts(spec, f"{prefix}.block", last, mixture=is_mixture(spec, last)),
        *_at(f"{prefix}.norm", _norm(spec.dim)),
    )
    yield from (dataclasses.replace(part, section="ahead") for part in parts)


def buffers(spec: ModelSpec) -> Iterator[Parameter]:
    """Buffers that belong to the state of a resolved model: the balance bias of each router, fp32, in their order."""
    if spec.moe is not None and spec.moe.balance_bias:
        for part in parameters(spec):
            if part.kind == "router":
                name = part.name.removesuffix("weight") + "bias"
                yield Parameter(name, (spec.moe.experts,), "balance")


# --- The parts of each kind of layer, in the order and under the names of its module ---


def block_parts(spec: ModelSpec, name: str, layer: int, *, mixture: bool) -> Iterator[Parameter]:
    """The parameters of block ``name``, with a mixture of experts or a dense feed-forward layer."""
    return _block_at(name, layer, _block(spec, mixture=mixture))


def _block(spec: ModelSpec, *, mixture: bool) -> tuple[Parameter, ...]:
    """The parameters of a block, named within it."""
    return (
        *_at("attention_norm", _norm(spec.dim)),
        *_at("attention", _attention(spec) if spec.mla is None else _latent_attention(spec, spec.mla)),
        *_at("ffn_norm", _norm(spec.dim)),
        *_at("ffn", _mixture(spec, spec.moe) if mixture and spec.moe else _feed_forward(spec, spec.ffn_dim)),
    )


def _block_at(name: str, layer: int, parts: Iterable[Parameter]) -> Iterator[Parameter]:
    """``parts`` as those of block ``name``, which is layer ``layer``."""
    for part in parts:
        path = f"{name}.{part.name}"
        # FSDP gathers experts apart from the rest of their block.
        unit = path.rpartition(".")[0] if part.stacked else name
        yield dataclasses.replace(part, name=path, layer=layer, unit=unit)


def _attention(spec: ModelSpec) -> Iterator[Parameter]:
    """Attention with grouped key and value heads (``phalanx.model.layers.attention``)."""
    queries, keys, bias = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.attention_bias
    yield from _at("query", _linear(spec.dim, queries, bias, tensor_dim=0))
    yield from _at("key", _linear(spec.dim, keys, bias, tensor_dim=0))
    yield from _at("value", _linear(spec.dim, keys, bias, tensor_dim=0))
    yield from _at("output", _linear(queries, spec.dim, bias, "output", tensor_dim=1))
    if spec.qk_norm:
        yield from _at("query_norm", _norm(spec.head_dim))
        yield from _at("key_norm", _norm(spec.head_dim))


def _latent_attention(spec: ModelSpec, mla: MlaSpec) -> Iterator[Parameter]:
    """Multi-head latent attention (``phalanx.model.layers.mla``); the projections into latents are alike on tensor ranks."""
    queries = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.query_rank:
        yield from _at("query_down", _linear(spec.dim, mla.query_rank, bias=False))
        yield from _at("query_latent_norm", _norm(mla.query_rank))
        yield from _at("query_up", _linear(mla.query_rank, queries, bias=False, tensor_dim=0))
    else:
        yield from _at("query", _linear(spec.dim, queries, bias=False, tensor_dim=0))
    yield from _at("kv_down", _linear(spec.dim, mla.kv_rank + mla.rope_head_dim, bias=False))
    yield from _at("kv_latent_norm", _norm(mla.kv_rank))
    expanded, values = spec.heads * (mla.nope_head_dim + mla.value_head_dim), spec.heads * mla.value_head_dim
    yield from _at("kv_up", _linear(mla.kv_rank, expanded, bias=False, tensor_dim=0))
    yield from _at("output", _linear(values, spec.dim, False, "output", tensor_dim=1))


def score_widths(spec: ModelSpec) -> int:
    """Widths of one head's query and of its value together: what each score costs in attention."""
    return spec.head_dim + (spec.head_dim if spec.mla is None else spec.mla.value_head_dim)


def _feed_forward(spec: ModelSpec, inner: int) -> Iterator[Parameter]:
    """A dense feed-forward layer (``phalanx.model.layers.feed_forward``)."""
    if spec.ffn == "swiglu":
        yield from _at("gate", _linear(spec.dim, inner, spec.ffn_bias, tensor_dim=0))
    yield from _at("up", _linear(spec.dim, inner, spec.ffn_bias, tensor_dim=0))
    yield from _at("down", _linear(inner, spec.dim, spec.ffn_bias, "output", tensor_dim=1))


def _mixture(spec: ModelSpec, moe: MoeSpec) -> Iterator[Parameter]:
    """Router, routed experts and the shared expert (``phalanx.model.layers.moe``)."""
    yield Parameter("router.weight", (moe.experts, spec.dim), "router", products=1)
    wide, narrow = (moe.experts, moe.ffn_dim, spec.dim), (moe.experts, spec.dim, moe.ffn_dim)
    if spec.ffn == "swiglu":
        yield Parameter("experts.gate", wide, "matrix", True, 1, products=1, per_token=moe.per_token)
    yield Parameter("experts.up", wide, "matrix", True, 1, products=1, per_token=moe.per_token)
    yield Parameter("experts.down", narrow, "output", True, 2, products=1, per_token=moe.per_token)
    if moe.shared:
        yield from _at("shared", _feed_forward(spec, moe.shared * moe.ffn_dim))


def _linear(
    inputs: int,
    outputs: int,
    bias: bool,
    kind: Literal["matrix", "output"] = "matrix",
    tensor_dim: int | None = None,
) -> Iterator[Parameter]:
    yield Parameter("weight", (outputs, inputs), kind, tensor_dim=tensor_dim, products=1)
    if bias:
        # Where ranks divide the inputs, their results are added up, and the bias is alike on all of them.
        yield Parameter("bias", (outputs,), "bias", tensor_dim=0 if tensor_dim == 0 else None)


def _norm(dim: int) -> Iterator[Parameter]:
    yield Parameter("weight", (dim,), "norm")


def _at(name: str, parts: Iterable[Parameter], *, section: Section = "block") -> Iterator[Parameter]:
    """``parts`` under the module ``name``."""
    for part in parts:
        yield dataclasses.replace(part, name=f"{name}.{part.name}", section=section)

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); its module is ``phalanx.model.layers.attention.mla``.

The projections into latents are small and equal on all tensor ranks. A rank computes them for its piece of the sequence and gathers the latents,
which are narrower than hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.run.fields import Problem
from phalanx.run.kinds import operations as op
from phalanx.run.spec import MlaSpec, ModelSpec

TITLE: str = "latent attention"
OWN_FIELDS: tuple[str, ...] = ("mla",)


def _latents(model: ModelSpec) -> MlaSpec:
    assert model.mla is not None, "the kind is chosen by this section"
    return model.mla


def is_absorbed(model: ModelSpec) -> bool:
    """Return True if heads attend to latents directly (``model.mla.absorbed``), with one shared key head; False for other attention."""
    return model.mla is not None and model.mla.absorbed


def problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the problems of an odd ``rope_head_dim``, of a ``head_dim`` that is not the sum of its two parts, and of
    ``kv_heads`` other than ``heads``; 0 is allowed for the last two.
    """
    mla = _latents(model)
    if mla.rope_head_dim % 2:
        yield Problem(
            "model.mla.rope_head_dim",
            f"{mla.rope_head_dim} elements cannot be rotated in pairs",
            "it must be even",
        )
    if model.head_dim not in (0, head_dim(model)):
        yield Problem(
            "model.head_dim",
            f"{model.head_dim} is not nope_head_dim + rope_head_dim = {head_dim(model)}",
            "latent attention has widths of its own: set it to 0",
            ("model.mla.nope_head_dim", "model.mla.rope_head_dim"),
        )
    if model.kv_heads not in (0, model.heads):
        yield Problem(
            "model.kv_heads",
            f"latent attention has as many key heads as query heads, {model.heads}",
            "set it to 0",
            ("model.heads", "model.mla"),
        )


def head_dim(model: ModelSpec) -> int:
    """The part of a head without position, and the rotated part."""
    return _latents(model).nope_head_dim + _latents(model).rope_head_dim


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Heads, of which queries and keys have as many."""
    yield "model.heads", model.heads


def key_heads(model: ModelSpec) -> int:
    """Return the number of query heads: there are as many key heads."""
    return model.heads


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:  # noqa: ARG001
    """None: all axes can divide it."""
    yield from ()


def parts(model: ModelSpec) -> Iterator[op.Parameter]:
    """Yield the parameters: projections into latents and their norms, projections out of them divided by heads, and
    the output. Without ``query_rank`` queries have no latent.
    """
    mla = _latents(model)
    queries = model.heads * head_dim(model)
    if mla.query_rank:
        yield from op.under("query_down", op.linear(model.dim, mla.query_rank))
        yield from op.under("query_latent_norm", op.norm(mla.query_rank))
        yield from op.under("query_up", op.linear(mla.query_rank, queries, tensor_dim=0))
    else:
        yield from op.under("query", op.linear(model.dim, queries, tensor_dim=0))
    yield from op.under("kv_down", op.linear(model.dim, mla.kv_rank + mla.rope_head_dim))
    yield from op.under("kv_latent_norm", op.norm(mla.kv_rank))
    expanded, values = (
        model.heads * (mla.nope_head_dim + mla.value_head_dim),
        model.heads * mla.value_head_dim,
    )
    yield from op.under("kv_up", op.linear(mla.kv_rank, expanded, tensor_dim=0))
    yield from op.under("output", op.linear(values, model.dim, kind="output", tensor_dim=1))


def core(model: ModelSpec) -> op.AttentionCore:
    """Return attention with queries and keys ``head_dim`` wide, and values ``value_head_dim``. Absorbed, queries are
    as wide as the latent with the shared rotated key, and values as the latent.
    """
    mla = _latents(model)
    if mla.absorbed:
        return op.AttentionCore(model.heads, mla.kv_rank + mla.rope_head_dim, mla.kv_rank)
    return op.AttentionCore(model.heads, head_dim(model), mla.value_head_dim)


def operations(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations of the layer: projections into latents, norms, out of them, rotation of a part of each
    head, attention, the output projection.
    """
    mla, heads, weights = _latents(model), core(model), op.by_name(parts(model))
    down = tuple(weights[name] for name in ("query_down.weight", "kv_down.weight") if name in weights)
    query = weights["query_up.weight" if mla.query_rank else "query.weight"]
    latents = mla.query_rank + mla.kv_rank
    return (
        op.MatrixProduct("projection", "local", down, kept=True),
        # Two kernels are counted even where queries have no latent.
        op.Norm("norm", tuple(part for part in weights.values() if part.kind == "norm"), kernels=2),
        op.LayerExchange("latent_up", "gather", latents + mla.rope_head_dim),
        op.MatrixProduct("latent_up", "tokens", (query,)),
        # Absorbed, half of it is multiplied with queries here and half with results later: as many operations.
        op.MatrixProduct("latent_up", "tokens", (weights["kv_up.weight"],)),
        *(_absorbed(model) if mla.absorbed else _expanded(model)),
        heads,
        op.MatrixProduct("out", "tokens", (weights["output.weight"],)),
        op.LayerExchange("out", "scatter", model.dim),
    )


def _expanded(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations between projections and attention: rotation and joining of heads, the kept queries, keys
    and values, and their exchange over context ranks.
    """
    queries, values = model.heads * head_dim(model), model.heads * _latents(model).value_head_dim
    return (
        # The rotated parts, and each joined to its head: the shared key's to that of every head.
        op.Pointwise("latent_up", "tokens", 4 * queries, 4 * queries, "tensor", kernels=3),
        op.KeptTensor("latent_up", "tokens", 2 * queries + values, "tensor"),
        op.LayerExchange("core", "context", queries + values),
    )


def _absorbed(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations on queries and latents before attention, and on its result: rows are regrouped by head for products, and rotated parts joined."""
    mla, heads = _latents(model), core(model)
    fixed, values = model.heads * mla.nope_head_dim, model.heads * mla.value_head_dim
    queries, mixed = heads.heads * heads.query_width, heads.heads * heads.value_width
    key_width = heads.query_width
    moved = 2 * (fixed + queries + mixed + values)
    return (
        op.Pointwise("latent_up", "tokens", moved, moved, "tensor", kernels=5),
        op.Pointwise("latent_up", "tokens", 2 * key_width, 2 * key_width, kernels=2),
        op.KeptTensor("latent_up", "tokens", fixed + queries, "tensor"),
        op.KeptTensor("latent_up", "tokens", key_width),
        # The result as the product reads it, which is another order, and what that makes of it for the output projection.
        op.KeptTensor("out", "tokens", mixed + values, "tensor"),
        # Keys and values are latents, which all heads share.
        op.LayerExchange("core", "context", 2 * key_width, "none"),
    )


def rotated_width(model: ModelSpec) -> int:
    """The part of a head that is rotated."""
    return _latents(model).rope_head_dim


def cache_row(model: ModelSpec) -> tuple[int, int, int]:
    """The latent of keys and values, and the rotated part of the key, which all heads share."""
    return 1, _latents(model).kv_rank, _latents(model).rope_head_dim


def tiny(model: ModelSpec, tensor: int) -> ModelSpec:
    """Return a model with one head for each of ``tensor`` tensor ranks, latents 8 wide, and both parts of a head and
    its values 8 wide each; without latent queries if it has none.
    """
    rank = 8 if _latents(model).query_rank else 0
    mla = dataclasses.replace(
        _latents(model), query_rank=rank, kv_rank=8, nope_head_dim=8, rope_head_dim=8, value_head_dim=8
    )
    return dataclasses.replace(model, heads=tensor, kv_heads=tensor, head_dim=16, mla=mla)

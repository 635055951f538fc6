"""Attention with grouped key and value heads (arXiv 2305.13245); its module is ``phalanx.model.layers.attention.attention``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from phalanx.run.fields import Problem, divisors_near
from phalanx.run.kinds import operations as op
from phalanx.run.spec import ModelSpec

TITLE: str = "grouped attention"
OWN_FIELDS: tuple[str, ...] = (
    *("qk_norm", "qk_norm_width", "attention_bias", "qkv_bias", "rope_fraction"),
    *("score_width", "score_cap", "sinks", "attention_pattern", "window", "window_rope_theta"),
)


def problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the problems of heads that do not divide or cannot be rotated in pairs; of two kinds of biases; of a
    window or its theta without such layers or the reverse; of norms and temperatures without use.
    """
    if model.head_dim == 0 and model.dim % model.heads:
        yield Problem(
            "model.heads",
            f"dim {model.dim} is not divisible by {model.heads} heads",
            f"{divisors_near(model.dim, model.heads)} divide it; or give model.head_dim",
            ("model.dim", "model.head_dim"),
        )
    elif model.rope_fraction == 1 and head_dim(model) % 2:
        yield Problem(
            "model.head_dim",
            f"a head of {head_dim(model)} elements cannot be rotated in pairs",
            "rotary embeddings need an even head_dim",
            ("model.dim", "model.heads"),
        )
    elif rotated_of(model) < 2 or rotated_of(model) % 2:
        yield Problem(
            "model.rope_fraction",
            f"{rotated_of(model)} of {head_dim(model)} elements of a head cannot be rotated in pairs",
            "the rotated elements must be an even number, at least 2",
            ("model.head_dim", "model.dim", "model.heads"),
        )
    if model.attention_bias and model.qkv_bias:
        yield Problem(
            "model.qkv_bias",
            "attention_bias gives the same projections their biases, and the output projection too",
            "set one of the two",
            ("model.attention_bias",),
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"{model.heads} heads cannot be shared out over {model.kv_heads} key/value heads",
            f"{divisors_near(model.heads, model.kv_heads)} divide {model.heads}",
            ("model.heads",),
        )
    if ("window" in model.attention_pattern) != (model.window > 0):
        yield Problem(
            "model.window",
            f"a window of {model.window} tokens does not go with attention_pattern = {list(model.attention_pattern)}",
            'layers with "window" need a window of at least 1, and a window needs such layers',
            ("model.attention_pattern",),
        )
    if model.window_rope_theta and (model.window_rope_theta <= 1 or not model.window):
        yield Problem(
            "model.window_rope_theta",
            f"{model.window_rope_theta:g} cannot be the base of wavelengths of layers with a sliding window",
            "a number above 1 where attention_pattern has such layers; else 0",
            ("model.attention_pattern", "model.window"),
        )
    if model.qk_norm_width != "head" and not model.qk_norm:
        yield Problem(
            "model.qk_norm_width",
            "queries and keys are not normalized",
            'set model.qk_norm = true, or leave it at "head"',
            ("model.qk_norm",),
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and scaling.mscale_all_dim:
        yield Problem(
            "model.rope_scaling.mscale_all_dim",
            "only latent attention has a temperature in its softmax",
            "set it to 0, or describe [model.mla]",
            ("model.mla", "model.rope_scaling"),
        )


def head_dim(model: ModelSpec) -> int:
    """Width of a head."""
    return model.head_dim or model.dim // model.heads


def attention_of(model: ModelSpec, layer: int) -> Literal["full", "window", "no-position"]:
    """The attention of layer ``layer``, from 0."""
    return (
        model.attention_pattern[layer % len(model.attention_pattern)] if model.attention_pattern else "full"
    )


def window_of(model: ModelSpec, layer: int) -> int:
    """Tokens that a token sees in layer ``layer``, itself among them; 0 if it sees all before it."""
    return model.window if attention_of(model, layer) == "window" else 0


def rotated_of(model: ModelSpec) -> int:
    """Elements of a head that are rotated."""
    return int(head_dim(model) * model.rope_fraction)


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Query heads."""
    yield "model.heads", model.heads


def key_heads(model: ModelSpec) -> int:
    """Key and value heads: tensor ranks divide them, or so many ranks share each."""
    return model.kv_heads or model.heads


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Yield "tensor" with the reason if norms span all heads; else nothing, as all axes can divide this attention."""
    if model.qk_norm and model.qk_norm_width == "all":
        yield (
            "tensor",
            Problem(
                "parallel.tensor",
                'with model.qk_norm_width = "all" queries are normalized over all heads, of which a tensor rank has some',
                'set parallel.tensor = 1, or model.qk_norm_width = "head"',
                ("model.qk_norm_width", "model.qk_norm"),
            ),
        )


def parts(model: ModelSpec) -> Iterator[op.Parameter]:
    """Yield projections divided by heads, with ``qk_norm`` the norms of queries and keys, and with ``sinks`` a logit of each head."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    bias = model.attention_bias or model.qkv_bias
    if model.sinks:
        yield op.Parameter("sinks", (model.heads,), "bias", tensor_dim=0)
    yield from op.under("query", op.linear(model.dim, queries, bias, tensor_dim=0))
    yield from op.under("key", op.linear(model.dim, keys, bias, tensor_dim=0, most_parts=model.kv_heads))
    yield from op.under("value", op.linear(model.dim, keys, bias, tensor_dim=0, most_parts=model.kv_heads))
    yield from op.under("output", op.linear(queries, model.dim, model.attention_bias, "output", tensor_dim=1))
    if model.qk_norm:
        alone = model.qk_norm_width == "head"
        yield from op.under("query_norm", op.norm(model.head_dim if alone else queries))
        yield from op.under("key_norm", op.norm(model.head_dim if alone else keys))


def core(model: ModelSpec) -> op.AttentionCore:
    """Return attention with queries, keys and values ``head_dim`` wide, and the window of each layer if the model has one."""
    windows = tuple(window_of(model, layer) for layer in range(model.layers)) if model.window else ()
    return op.AttentionCore(
        model.heads, model.head_dim, model.head_dim, windows=windows, capped=model.score_cap > 0
    )


def operations(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations of the layer: queries, keys and values by one product; rotation; attention, with a pass
    over its result for sinks; the output projection.
    """
    weights = op.by_name(parts(model))
    queries, keys = weights["query.weight"].shape[0], weights["key.weight"].shape[0]
    projections = tuple(weights[f"{name}.weight"] for name in ("query", "key", "value"))
    norms = tuple(part for part in weights.values() if part.kind == "norm")
    # Sinks shrink what attention gives: a pass over it, and in backward over it and its gradient.
    sinks = (op.Pointwise("core", "tokens", 2 * queries, 3 * queries, "tensor"),) if model.sinks else ()
    return (
        op.LayerExchange("projection", "gather", model.dim),
        op.MatrixProduct("projection", "tokens", projections, kept=True),
        op.Rotation((queries + keys) * rotated_of(model) // model.head_dim, queries + keys, norms),
        op.LayerExchange("core", "context", 2 * keys, "key_heads"),
        core(model),
        *sinks,
        op.MatrixProduct("out", "tokens", (weights["output.weight"],)),
        op.LayerExchange("out", "scatter", model.dim),
    )


def rotated_width(model: ModelSpec) -> int:
    """The whole head, or its first elements."""
    return rotated_of(model)


def cache_row(model: ModelSpec) -> tuple[int, int, int]:
    """A key and a value of each key/value head."""
    return model.kv_heads, model.head_dim, model.head_dim


def tiny(model: ModelSpec, tensor: int) -> ModelSpec:
    """A head for each tensor rank, and key heads that as many ranks share."""
    keys = model.kv_heads if model.kv_heads < tensor and tensor % model.kv_heads == 0 else tensor
    return dataclasses.replace(model, heads=tensor, kv_heads=keys, head_dim=8)

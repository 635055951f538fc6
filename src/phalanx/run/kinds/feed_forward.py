"""Feed-forward layers, dense (``phalanx.model.layers.dense``) and as a mixture of experts: router, routed experts and a shared expert
(``phalanx.model.layers.moe``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from phalanx.run.fields import Problem, divisors_near
from phalanx.run.kinds import operations as op
from phalanx.run.spec import ModelSpec, MoeSpec


def default_width(model: ModelSpec) -> int:
    """Return the inner width for ``ffn_dim`` 0."""
    # Three matrices of 8/3 dim hold as much as two of 4 dim (Shazeer, arXiv 2002.05202).
    inner = 8 * model.dim / 3 if is_gated(model) else 4 * model.dim
    return 64 * math.ceil(inner / 64)


def is_gated(model: ModelSpec) -> bool:
    """Return True if the activation multiplies with a gate, which has another matrix."""
    return model.ffn != "gelu"


def dense_parts(model: ModelSpec, inner: int) -> Iterator[op.Parameter]:
    """Yield the matrices, and biases if any, of a layer ``inner`` elements wide, divided there over tensor ranks; the
    gate only if the model has one.
    """
    if is_gated(model):
        yield from op.under("gate", op.linear(model.dim, inner, model.ffn_bias, tensor_dim=0))
    yield from op.under("up", op.linear(model.dim, inner, model.ffn_bias, tensor_dim=0))
    yield from op.under("down", op.linear(inner, model.dim, model.ffn_bias, "output", tensor_dim=1))


def dense_operations(model: ModelSpec, inner: int) -> tuple[op.Operation, ...]:
    """Return the operations of a dense layer: the gather, one product to values (and their gate, if the model has one), the activation, the
    product back, and the scatter."""
    weights = op.by_name(dense_parts(model, inner))
    widen = tuple(weights[name] for name in ("gate.weight", "up.weight") if name in weights)
    return (
        op.LayerExchange("widen", "gather", model.dim),
        op.MatrixProduct("widen", "tokens", widen, kept=True),
        op.Activation("activation", "tokens", inner, is_gated(model), "tensor"),
        op.MatrixProduct("down", "tokens", (weights["down.weight"],)),
        op.LayerExchange("down", "scatter", model.dim),
    )


_ALIGNED = 8  # elements: grouped matrix products need rows of a multiple of 16 bytes, also in bf16


def is_mixture(model: ModelSpec, layer: int) -> bool:
    """Return True if the feed-forward layer of layer ``layer``, from 0, is a mixture of experts: the last of each
    ``moe.every`` layers after the first ``moe.first_dense``.
    """
    moe = model.moe
    if moe is None or layer < moe.first_dense:
        return False
    return (layer - moe.first_dense + 1) % moe.every == 0


def dense_width(model: ModelSpec) -> int:
    """Return the width of dense feed-forward layers of a resolved model; 0 if all layers are mixtures."""
    return 0 if all(is_mixture(model, layer) for layer in range(model.layers)) else model.ffn_dim


def problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the problems of layers and widths of a mixture, of a shared gate without shared experts, and of routing;
    none for a dense model.
    """
    if model.moe is not None:
        yield from _layers(model, model.moe)
        if model.moe.shared_gate and not model.moe.shared:
            yield Problem(
                "model.moe.shared_gate",
                "there are no shared experts to weigh",
                "set it to false, or model.moe.shared above 0",
                ("model.moe.shared",),
            )
        yield from _routing(model.moe)


def _layers(model: ModelSpec, moe: MoeSpec) -> Iterator[Problem]:
    """Yield the problems of a mixture without a layer, and of model and expert widths that are not aligned to 16 bytes."""
    if moe.first_dense + moe.every > model.layers:
        yield Problem(
            "model.moe.first_dense",
            f"of {model.layers} layers, {moe.first_dense} dense first and then one in {moe.every}: no layer is a mixture",
            f"first_dense + every must be at most {model.layers}",
            ("model.moe.every", "model.layers"),
        )
    for path, width in (("model.dim", model.dim), ("model.moe.ffn_dim", moe.ffn_dim or model.ffn_dim)):
        if width % _ALIGNED:
            yield Problem(
                path,
                f"{width} elements of an expert's matrix are no whole number of 16 bytes",
                f"it must be a multiple of {_ALIGNED}",
                ("model.moe", "model.ffn_dim"),
            )


def _routing(moe: MoeSpec) -> Iterator[Problem]:
    """Yield the problems of groups, of experts per token, and of a single normalized score. A number of groups that
    does not divide, or too many per token, ends the check.
    """
    if moe.experts % moe.groups:
        yield Problem(
            "model.moe.groups",
            f"{moe.experts} experts cannot be divided into {moe.groups} groups",
            f"{divisors_near(moe.experts, moe.groups)} divide {moe.experts}",
            ("model.moe.experts",),
        )
        return
    if moe.groups > 1 and moe.group_score == "two-best" and moe.experts // moe.groups < 2:
        yield Problem(
            "model.moe.groups",
            "groups of one expert cannot be judged by their two best",
            f"at most {moe.experts // 2} groups",
            ("model.moe.experts", "model.moe.group_score"),
        )
    if moe.groups_per_token > moe.groups:
        yield Problem(
            "model.moe.groups_per_token",
            f"a token cannot choose {moe.groups_per_token} of only {moe.groups} groups",
            f"at most {moe.groups}",
            ("model.moe.groups",),
        )
        return
    open_experts = moe.experts // moe.groups * moe.groups_per_token
    if moe.per_token > open_experts:
        yield Problem(
            "model.moe.per_token",
            f"a token cannot be sent to {moe.per_token} of {open_experts} experts",
            f"at most {open_experts}" + (", or more groups_per_token" if moe.groups > 1 else ""),
            ("model.moe.experts", "model.moe.groups", "model.moe.groups_per_token"),
        )
    if moe.per_token == 1 and moe.normalize:
        yield Problem(
            "model.moe.normalize",
            "the score of a single expert, scaled to sum to one, is always one: the router would learn nothing",
            "set it to false, or per_token above 1",
            ("model.moe.per_token",),
        )


def tensor_sizes(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield the field and size of each inner width that tensor ranks divide: dense and shared experts'. One that a
    model leaves open can be divided by any usual number of ranks.
    """
    if model.ffn_dim:
        yield "model.ffn_dim", model.ffn_dim
    moe = model.moe
    if moe is not None and moe.shared and (moe.ffn_dim or model.ffn_dim):
        yield "model.moe.ffn_dim", moe.shared * (moe.ffn_dim or model.ffn_dim)


def mixture_parts(model: ModelSpec, moe: MoeSpec) -> Iterator[op.Parameter]:
    """Yield, each if the model has it: the shared expert's gate, the router and its bias, stacks of the experts'
    matrices and biases, and the shared expert's parts.
    """
    if moe.shared_gate:
        yield op.Parameter("shared_gate", (1, model.dim), "gate", products=1)
    yield op.Parameter("router.weight", (moe.experts, model.dim), "router", products=1)
    if moe.router_bias:
        yield op.Parameter("router.logit_bias", (moe.experts,), "bias")
    wide, narrow = (moe.experts, moe.ffn_dim, model.dim), (moe.experts, model.dim, moe.ffn_dim)
    if is_gated(model):
        yield op.Parameter("experts.gate", wide, "matrix", True, 1, products=1, per_token=moe.per_token)
    yield op.Parameter("experts.up", wide, "matrix", True, 1, products=1, per_token=moe.per_token)
    yield op.Parameter("experts.down", narrow, "output", True, 2, products=1, per_token=moe.per_token)
    if model.ffn_bias:
        inner = ("gate_bias", "up_bias") if is_gated(model) else ("up_bias",)
        for name, width in (*((name, moe.ffn_dim) for name in inner), ("down_bias", model.dim)):
            # Ranks that divide an expert's matrices add up their results, of which each adds the bias to a part of its own.
            yield op.Parameter(
                f"experts.{name}", (moe.experts, width), "bias", True, 1, per_token=moe.per_token
            )
    if moe.shared:
        yield from op.under("shared", dense_parts(model, moe.shared * moe.ffn_dim))


def mixture_operations(model: ModelSpec, moe: MoeSpec) -> tuple[op.Operation, ...]:
    """Return the operations of a mixture: the choice of experts, the exchange of tokens, the experts, the exchange
    back, and the shared expert.
    """
    weights = op.by_name(mixture_parts(model, moe))
    dim, inner = model.dim, moe.ffn_dim
    widen = tuple(weights[name] for name in ("experts.gate", "experts.up") if name in weights)
    shared: tuple[op.Operation, ...] = dense_operations(model, moe.shared * inner) if moe.shared else ()
    if moe.shared_gate:
        # The gate's sigmoid, and the product with the shared experts' result.
        weighed = op.Pointwise("combine", "local", 3 * dim, 5 * dim, kernels=2)
        shared = (*shared, op.MatrixProduct("router", "local", (weights["shared_gate"],)), weighed)
    return (
        op.MatrixProduct("router", "local", (weights["router.weight"],)),
        # Scores, the choice, its balance and its loss: some twenty small kernels (Megatron Core's TopKRouter).
        op.Pointwise("router", "local", 8 * moe.experts, 4 * moe.experts, kernels=20),
        op.KeptTensor("router", "local", 2 * moe.experts, bytes=4),
        # The router computes in the format of activations, even if the experts do not.
        op.KeptTensor("norm", "local", dim, beside=True),
        # In backward the gradients of the router, of the experts and of those that are shared are added up.
        op.Pointwise("router", "local", 0, 3 * dim * (1 + (moe.shared > 0))),
        op.Permutation("dispatch", dim, moe.per_token),
        op.LayerExchange("dispatch", "dispatch", dim),
        op.LayerExchange("dispatch", "expert_gather", dim),
        op.KeptTensor("dispatch", "routed", dim, operand=True),
        op.MatrixProduct("expert_widen", "routed", widen, kept=True),
        *_adding_biases(model, "expert_widen", len(widen) * inner, "expert_tensor"),
        op.Activation("expert_activation", "routed", inner, is_gated(model), "expert_tensor"),
        op.MatrixProduct("expert_down", "routed", (weights["experts.down"],)),
        *_adding_biases(model, "expert_down", dim, "none"),
        op.LayerExchange("combine", "expert_scatter", dim),
        op.LayerExchange("combine", "combine", dim),
        op.Permutation("combine", dim, moe.per_token),
        *shared,
        op.AroundExperts(moe.experts, dim, inner),
    )


def _adding_biases(model: ModelSpec, part: str, width: int, over: op.Axis) -> tuple[op.Operation, ...]:
    """Rows read and written with a bias of their expert, and in backward summed for its gradient."""
    return (op.Pointwise(part, "routed", 2 * width, width, over),) if model.ffn_bias else ()


def tiny(model: ModelSpec, tensor: int) -> ModelSpec:
    """Experts with a few inner elements for each tensor rank."""
    moe = None if model.moe is None else dataclasses.replace(model.moe, ffn_dim=8 * tensor)
    return dataclasses.replace(model, moe=moe)

"""A block, the ends of a model, and its predictions further ahead (``phalanx.model.transformer``).

In a block, attention and feed-forward are each normalized before or after, and added to the residual stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from phalanx.run.fields import Problem
from phalanx.run.kinds import feed_forward
from phalanx.run.kinds import operations as op
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.spec import ModelSpec


def parts(model: ModelSpec, *, mixed: bool) -> tuple[op.Parameter, ...]:
    """Return the parameters of a block, named within it, with a mixture of experts if ``mixed`` or else a dense feed-forward layer."""
    before = norm_before(model)
    after = norm_after(model)
    return (
        *op.under("attention_norm", before),
        *op.under("attention", attention_kind(model).parts(model)),
        *op.under("attention_post_norm", after),
        *op.under("ffn_norm", before),
        *op.under(
            "ffn",
            feed_forward.mixture_parts(model, model.moe)
            if mixed and model.moe
            else feed_forward.dense_parts(model, model.ffn_dim),
        ),
        *op.under("ffn_post_norm", after),
    )


def norm_before(model: ModelSpec) -> tuple[op.Parameter, ...]:
    """The norm before attention, and before the feed-forward layer; empty if there is none."""
    return tuple(op.norm(model.dim)) if model.norm_placement != "after" else ()


def norm_after(model: ModelSpec) -> tuple[op.Parameter, ...]:
    """The norm of attention's result, and of the feed-forward layer's; empty if there is none."""
    return tuple(op.norm(model.dim)) if model.norm_placement != "before" else ()


def placed(name: str, layer: int, rows: Iterable[op.Parameter]) -> Iterator[op.Parameter]:
    """Yield the parameters ``rows`` with names below block ``name``, which is layer ``layer``. A stack of experts has
    its own FSDP unit, others the block's.
    """
    for part in rows:
        path = f"{name}.{part.name}"
        # FSDP gathers experts apart from the rest of their block.
        unit = path.rpartition(".")[0] if part.stacked else name
        yield dataclasses.replace(part, name=path, layer=layer, unit=unit)


def operations(model: ModelSpec, *, mixed: bool) -> tuple[op.Operation, ...]:
    """Return the operations of a block in their order, with a mixture of experts if ``mixed`` or else a dense feed-forward layer."""
    before = (op.Norm("norm", norm_before(model)),) if norm_before(model) else ()
    after = (op.Norm("residual", norm_after(model)),) if norm_after(model) else ()
    return (
        op.KeptTensor("input", "local", model.dim),
        *before,
        *attention_kind(model).operations(model),
        *after,
        # The residual sum, and in backward that of its gradients, reads two and writes one; twice in a layer.
        op.Pointwise("out", "local", 6 * model.dim, 6 * model.dim, kernels=2),
        op.KeptTensor("residual", "local", model.dim),
        *before,
        *(
            feed_forward.mixture_operations(model, model.moe)
            if mixed and model.moe
            else feed_forward.dense_operations(model, model.ffn_dim)
        ),
        *after,
        op.Dropout(model.dim),
    )


# The ends of a model: the embedding, and the final norm with the output projection.


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Yield the axes whose degree must be 1, with the reason: "pipeline" for tied embeddings."""
    if model.tie_embeddings:
        yield (
            "pipeline",
            Problem(
                "model.tie_embeddings",
                "the first and the last stage cannot share one matrix",
                "set model.tie_embeddings = false, or parallel.pipeline = 1",
                ("parallel.pipeline",),
            ),
        )


def embedding_parts(model: ModelSpec, predictions: int) -> Iterator[op.Parameter]:
    """Yield the embedding. If it is also the output projection, it multiplies for ``predictions`` tokens."""
    shape, products = (model.vocab_size, model.dim), predictions if model.tie_embeddings else 0
    yield op.Parameter(
        "embedding.weight", shape, "embedding", tensor_dim=0, products=products, section="embedding"
    )


def head_parts(model: ModelSpec, predictions: int) -> Iterator[op.Parameter]:
    """Yield the final norm, and the output projection of ``predictions`` tokens if it is a separate matrix."""
    yield from op.under("norm", op.norm(model.dim), section="end")
    if not model.tie_embeddings:
        shape = model.vocab_size, model.dim
        # Predictions further ahead multiply with it too, all through the pass.
        unit = op.HEAD_UNIT if predictions == 1 else ""
        yield op.Parameter(
            "head.weight", shape, "matrix", tensor_dim=0, products=predictions, section="end", unit=unit
        )


def embedding_operations(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations of the look-up, whose rows tensor ranks add up."""
    return (
        op.Pointwise("norm", "tokens", 2 * model.dim, 3 * model.dim),
        op.LayerExchange("norm", "scatter", model.dim),
        op.Dropout(model.dim, results=1),
    )


def head_operations(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations of the final norm, the scores of one prediction, and their loss."""
    ends = (*embedding_parts(model, 1), *head_parts(model, 1))
    (projection,) = (part for part in ends if part.products)
    return (
        op.KeptTensor("input", "local", model.dim),
        op.Norm("norm", tuple(op.norm(model.dim))),
        op.LayerExchange("projection", "gather", model.dim),
        op.MatrixProduct("projection", "tokens", (projection,)),
        op.LossOfScores(model.vocab_size, capped=model.logit_cap > 0),
    )


# Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): each prediction further ahead has a block of its own.


def prediction_depths(model: ModelSpec) -> int:
    """Number of predictions beyond the next token; each has a block of its own."""
    return model.mtp_depth


def without_predictions(model: ModelSpec) -> ModelSpec:
    """The main model alone, which is all that generation needs."""
    return dataclasses.replace(model, mtp_depth=0)


def predictions_undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Yield the axes whose degree must be 1, with the reason; none without multi-token prediction."""
    if model.mtp_depth:
        problem = "predicting further ahead needs the embedding, which only the first stage has"
        remedy = "set parallel.pipeline = 1, or model.mtp_depth = 0"
        yield "pipeline", Problem("model.mtp_depth", problem, remedy, ("parallel.pipeline",))


def prediction_parts(model: ModelSpec, depth: int) -> Iterator[op.Parameter]:
    """Yield the parameters of prediction ``depth``, from 0, below ``mtp.DEPTH``; its block is like the model's last."""
    prefix, last = f"mtp.{depth}", model.layers - 1
    rows = (
        *op.under(f"{prefix}.hidden_norm", op.norm(model.dim)),
        *op.under(f"{prefix}.embedding_norm", op.norm(model.dim)),
        *op.under(f"{prefix}.projection", op.linear(2 * model.dim, model.dim)),
        *placed(f"{prefix}.block", last, parts(model, mixed=is_mixture(model, last))),
        *op.under(f"{prefix}.norm", op.norm(model.dim)),
    )
    yield from (dataclasses.replace(part, section="ahead") for part in rows)


def prediction_operations(model: ModelSpec) -> tuple[op.Operation, ...]:
    """Return the operations of one prediction: embedding and hidden state joined and projected, a block like the last, the head."""
    weights = (part for part in op.linear(2 * model.dim, model.dim) if part.products)
    return (
        op.MatrixProduct("projection", "local", tuple(weights)),
        *operations(model, mixed=is_mixture(model, model.layers - 1)),
        *head_operations(model),
    )

"""The ends of a model: the embedding, and the final norm with the output projection (``phalanx.model.transformer``)."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.fields import Problem
from phalanx.run.kinds.operations import (
    HEAD_UNIT,
    Dropout,
    KeptTensor,
    LayerExchange,
    LossOfScores,
    MatrixProduct,
    Norm,
    Operation,
    Parameter,
    Pointwise,
    norm,
    under,
)
from phalanx.run.spec import ModelSpec


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Axes whose degree must be 1, with the reason."""
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


def embedding_parts(model: ModelSpec, predictions: int) -> Iterator[Parameter]:
    """Yield the embedding. If it is also the output projection, it multiplies for ``predictions`` tokens."""
    shape, products = (model.vocab_size, model.dim), predictions if model.tie_embeddings else 0
    yield Parameter(
        "embedding.weight", shape, "embedding", tensor_dim=0, products=products, section="embedding"
    )


def head_parts(model: ModelSpec, predictions: int) -> Iterator[Parameter]:
    """Yield the final norm, and the output projection of ``predictions`` tokens if it is a separate matrix."""
    yield from under("norm", norm(model.dim), section="end")
    if not model.tie_embeddings:
        shape = model.vocab_size, model.dim
        # Predictions further ahead multiply with it too, all through the pass.
        unit = HEAD_UNIT if predictions == 1 else ""
        yield Parameter(
            "head.weight", shape, "matrix", tensor_dim=0, products=predictions, section="end", unit=unit
        )


def embedding_operations(model: ModelSpec) -> tuple[Operation, ...]:
    """The look-up, whose rows tensor ranks add up."""
    return (
        Pointwise("norm", "tokens", 2 * model.dim, 3 * model.dim),
        LayerExchange("norm", "scatter", model.dim),
        Dropout(model.dim, results=1),
    )


def head_operations(model: ModelSpec) -> tuple[Operation, ...]:
    """The final norm, the scores of one prediction, and their loss."""
    ends = (*embedding_parts(model, 1), *head_parts(model, 1))
    (projection,) = (part for part in ends if part.products)
    return (
        KeptTensor("input", "local", model.dim),
        Norm("norm", tuple(norm(model.dim))),
        LayerExchange("projection", "gather", model.dim),
        MatrixProduct("projection", "tokens", (projection,)),
        LossOfScores(model.vocab_size, capped=model.logit_cap > 0),
    )

"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2); its module is ``phalanx.model.transformer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.run.fields import Problem
from phalanx.run.kinds import block
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.operations import MatrixProduct, Operation, Parameter, linear, norm, under
from phalanx.run.spec import ModelSpec


def depths(model: ModelSpec) -> int:
    """Number of predictions beyond the next token; each has a block of its own."""
    return model.mtp_depth


def without(model: ModelSpec) -> ModelSpec:
    """The main model alone, which is all that generation needs."""
    return dataclasses.replace(model, mtp_depth=0)


def undivided(model: ModelSpec) -> Iterator[tuple[str, Problem]]:
    """Yield the axes whose degree must be 1, with the reason; none without multi-token prediction."""
    if model.mtp_depth:
        problem = "predicting further ahead needs the embedding, which only the first stage has"
        remedy = "set parallel.pipeline = 1, or model.mtp_depth = 0"
        yield "pipeline", Problem("model.mtp_depth", problem, remedy, ("parallel.pipeline",))


def parts(model: ModelSpec, depth: int) -> Iterator[Parameter]:
    """The parameters of prediction ``depth``, from 0; its block is like the model's last."""
    prefix, last = f"mtp.{depth}", model.layers - 1
    rows = (
        *under(f"{prefix}.hidden_norm", norm(model.dim)),
        *under(f"{prefix}.embedding_norm", norm(model.dim)),
        *under(f"{prefix}.projection", linear(2 * model.dim, model.dim)),
        *block.placed(f"{prefix}.block", last, block.parts(model, mixed=is_mixture(model, last))),
        *under(f"{prefix}.norm", norm(model.dim)),
    )
    yield from (dataclasses.replace(part, section="ahead") for part in rows)


def operations(model: ModelSpec) -> tuple[Operation, ...]:
    """One prediction: embedding and hidden state joined and projected, a block, the model's output projection."""
    weights = (part for part in linear(2 * model.dim, model.dim) if part.products)
    return (
        MatrixProduct("projection", "local", tuple(weights)),
        *block.operations(model, mixed=is_mixture(model, model.layers - 1)),
        *block.head_operations(model),
    )

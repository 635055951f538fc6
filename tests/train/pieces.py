"""Tiny runs that cut the model's width into lanes, their sequences into context tiles, or both."""

from __future__ import annotations

import dataclasses
from typing import Any

from layouts import DENSE, LATENT, MIXTURE, tiny
from phalanx.run.spec import ModelSpec, ParallelSpec, PrecisionSpec, RunSpec

ONE_RANK = ParallelSpec()
MODELS = {
    "dense": dataclasses.replace(DENSE, layers=2),
    "shared key heads": ModelSpec(
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        ffn_dim=64,
        vocab_size=61,
        tie_embeddings=True,
        attention_bias=True,
        ffn_bias=True,
        norm_placement="both",
        qk_norm=True,
    ),
    "mixture": dataclasses.replace(MIXTURE, layers=2),
    # The heads of absorbed latent attention multiply with their own rows of a matrix.
    "absorbed": dataclasses.replace(MIXTURE, layers=2, mla=dataclasses.replace(LATENT, absorbed=True)),
    "ahead": dataclasses.replace(DENSE, layers=1, kv_heads=1, sinks=False, tie_embeddings=True, mtp_depth=1),
    "two ahead": dataclasses.replace(DENSE, layers=1, mtp_depth=2),
    # As many as a pipeline of two ranks needs whose stages are in two parts.
    "four layers": DENSE,
    # Lanes and tiles of odd widths begin within cache lines, where a product may be rounded otherwise.
    "odd widths": ModelSpec(layers=1, dim=33, heads=4, kv_heads=4, head_dim=6, ffn_dim=28, vocab_size=61),
}
PIECES: dict[str, dict[str, Any]] = {
    "lanes": {"lanes": 4},
    "tiles": {"context_tiles": 4},
    "lanes and tiles": {"lanes": 4, "context_tiles": 4},
    "whole": {},
}


def model_in(pieces: str, model: str, **changes: Any) -> ModelSpec:
    """Return a model of ``MODELS`` cut into ``pieces``."""
    return dataclasses.replace(MODELS[model], **PIECES[pieces], **changes)


def run_in_pieces(model: ModelSpec, parallel: ParallelSpec = ONE_RANK, compute: str = "fp32") -> RunSpec:
    """Return a run whose loss has a chunk and a half for each lane or tile.

    In lanes alone it has four slots of one micro-batch of two sequences. In tiles it has two slots of two micro-batches of one sequence, in
    which documents end now and then.
    """
    spec = tiny(model, parallel)
    tiles = bool(model.context_tiles)
    train = dataclasses.replace(
        spec.train,
        batch_size=4 if tiles else 8,
        slots=2 if tiles else 4,
        micro_batch_size=1 if tiles else 2,
        loss_chunk=5 if tiles else 40,
        document_mask=tiles,
        end_of_document=7,
    )
    return dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]


def divided(model: ModelSpec, tensor: int = 1, context: int = 1, **other: Any) -> ParallelSpec:
    """Return a layout with these degrees, and as many expert ranks as share a slot where there are experts."""
    fields: dict[str, Any] = {"expert": tensor * context if model.moe else 1, **other}
    return ParallelSpec(tensor=tensor, context=context, context_mode="allgather", **fields)

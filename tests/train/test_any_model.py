"""Models, batches and formats by chance, in lanes or context tiles or both: each has one hash on layouts by chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from layouts import merged, steps_on_this_rank, tiny
from one_hash import same
from phalanx.run.layout import layout_problems
from phalanx.run.rules import check
from phalanx.run.spec import (
    MemorySpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
)
from ranks import Ranks

MOST_RANKS = 4
NEEDS_DATA = ("data", "checkpoint")
"""Sections whose rules need data, which these runs do not have."""


def some(draw: Random, **choices: Sequence[Any]) -> dict[str, Any]:
    """One of the ``choices`` for each field."""
    return {field: draw.choice(values) for field, values in choices.items()}


def a_model(draw: Random) -> ModelSpec:
    """Widths of all kinds, odd ones too, of every kind of layer."""
    lanes, tiles = draw.choice([(2, 0), (4, 0), (0, 2), (0, 4), (2, 2), (4, 2), (2, 4)])
    cut = max(1, lanes)
    common = some(
        draw,
        layers=(1, 2),
        ffn=("swiglu", "gelu", "geglu", "swiglu-clamped"),
        vocab_size=(9, 40, 61, 97),
        tie_embeddings=(False, True),
        norm_placement=("before", "after", "both"),
        norm_offset=(False, True),
        logit_cap=(0.0, 0.5),
        ffn_bias=(False, True),
        mtp_depth=(0, 0, 1, 2),
    )
    common |= {"lanes": lanes, "context_tiles": tiles, "heads": cut * draw.choice((1, 2, 3))}
    common |= {"dim": draw.choice((17, 20, 32, 33, 48)), "ffn_dim": cut * draw.choice((5, 7, 8, 16))}
    if draw.random() < 0.35:
        mixed = some(
            draw,
            experts=(4, 8),
            per_token=(2, 3),
            ffn_dim=(32, 64),
            shared=(0, 1),
            router_bias=(False, True),
            score=("softmax", "sigmoid"),
            balance_bias=(False, True),
            aux_loss=(0.0, 0.01),
            z_loss=(0.0, 0.001),
        )
        common |= {"moe": MoeSpec(**mixed), "dim": draw.choice((24, 32, 40, 48))}
    if draw.random() < 0.25:
        latent = some(
            draw,
            query_rank=(0, 13, 24),
            kv_rank=(8, 11, 16),
            nope_head_dim=(4, 5, 8),
            rope_head_dim=(2, 4, 6),
            value_head_dim=(5, 8, 16),
        )
        return ModelSpec(**common, mla=MlaSpec(**latent))
    heads = common["heads"]
    shared = [kv for kv in range(1, heads + 1) if heads % kv == 0 and (kv % cut == 0 or cut % kv == 0)]
    pattern = draw.choice(((), ("window",), ("window", "full"), ("full", "no-position")))
    grouped = some(
        draw,
        head_dim=(4, 6, 8, 10),
        kv_heads=shared,
        qk_norm=(False, True),
        score_cap=(0.0, 0.8),
        sinks=(False, True),
        attention_bias=(False, True),
    )
    window = draw.choice((3, 7, 16)) if "window" in pattern else 0
    return ModelSpec(**common, **grouped, attention_pattern=pattern, window=window)


def a_run(draw: Random) -> RunSpec:
    """A run of such a model on one rank, which no rule refuses."""
    while True:
        model = a_model(draw)
        pieces = max(1, model.lanes) * max(1, 2 * model.context_tiles)
        spec = tiny(model, ParallelSpec(), seq_len=pieces * -(-16 // pieces) * draw.choice((1, 2)))
        slots, micro = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 0))
        batch = some(
            draw,
            loss_chunk=(5, 16, 2048),
            document_mask=(False, True),
            targets_within_documents=(False, True),
            reduction=("reproducible", "reproducible", "integer"),
            expert_sums=("slot", "micro-batch"),
        )
        batch |= {"slots": slots, "micro_batch_size": micro, "end_of_document": 7}
        batch |= {"batch_size": slots * draw.choice((1, 2)) * max(1, micro)}
        narrow = ("compute", "compute", "fp8-tensorwise", "fp8-rowwise", "mxfp8")
        precision = PrecisionSpec(**some(draw, compute=("fp32", "bf16"), matmul=narrow))
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, **batch), precision=precision)
        if not [problem for problem in check(spec) if not problem.path.startswith(NEEDS_DATA)]:
            return spec


def layouts_of(spec: RunSpec, draw: Random) -> Iterator[tuple[int, RunSpec]]:
    """The same run on layouts of up to ``MOST_RANKS`` ranks, without end."""
    while True:
        degrees = some(draw, tensor=(1, 2, 4), context=(1, 2, 4), pipeline=(1, 1, 2), expert=(1, 2, 4))
        sharding, copies = draw.choice(("none", "zero2", "zero3")), draw.choice((1, 2, 3))
        ranks = degrees["tensor"] * degrees["context"] * degrees["pipeline"] * copies
        parallel = ParallelSpec(**degrees, sharding=sharding, context_mode="allgather")
        memory = MemorySpec(recompute=draw.choice(("none", "full", "selective")))
        other = dataclasses.replace(spec, parallel=parallel, memory=memory)
        if 1 < ranks <= MOST_RANKS and not layout_problems(other, ranks):
            yield ranks, other


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_model_in_lanes_or_tiles_has_one_hash_on_any_layout(ranks: Ranks, seed: int) -> None:
    draw = Random(seed)
    spec = a_run(draw)
    alone = merged(ranks.run(1, steps_on_this_rank, spec, 1))
    for count, other in (next(layouts_of(spec, draw)) for _ in range(2)):
        result = merged(ranks.run(count, steps_on_this_rank, other, 1))
        assert same(result, alone), f"{other.parallel}, {other.memory.recompute}"

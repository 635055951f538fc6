"""Zero-bubble schedules change no bit of a run whose activations are computed again, also if other operations are between a weight and its products.

Lanes, context tiles and tensor ranks let layers multiply with what derives from a weight while a block runs, and with the weight itself
when it is computed again; both times the same gradients must be put off.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from layouts import LATENT, merged, steps_on_this_rank, tiny
from one_hash import same
from phalanx.run.layout import layout_problems
from phalanx.run.spec import MemorySpec, ModelSpec, MoeSpec, ParallelSpec, RunSpec
from quick_cases import quick
from ranks import Ranks

SHARED = ModelSpec(layers=4, dim=16, heads=4, kv_heads=1, ffn_dim=32, vocab_size=31)
MODELS = {
    "shared key head": SHARED,
    "latent attention": dataclasses.replace(SHARED, kv_heads=0, mla=LATENT),
    "mixture": dataclasses.replace(
        SHARED, moe=MoeSpec(experts=4, per_token=2, ffn_dim=16, shared=1, shared_gate=True, first_dense=1)
    ),
}
CUTS: dict[str, tuple[dict[str, int], int]] = {
    "lanes": ({"lanes": 2}, 1),
    "context tiles": ({"context_tiles": 2}, 1),
    "lanes and tiles": ({"lanes": 2, "context_tiles": 2}, 1),
    "tensor ranks": ({}, 2),
}
"""By what is cut: fields of the model, and the tensor degree."""


def spec_of(
    model: ModelSpec, parallel: ParallelSpec, recompute: Literal["none", "full", "selective"]
) -> RunSpec:
    spec = tiny(model, parallel, seq_len=8, batch_size=8)
    return dataclasses.replace(spec, memory=MemorySpec(recompute=recompute))


@pytest.mark.parametrize(
    ("cut", "model", "schedule", "recompute"),
    quick(
        (
            (cut, model, schedule, recompute)
            for cut in CUTS
            for model in MODELS
            for schedule in ("zbv", "dualpipev")
            for recompute in ("full", "selective")
        ),
        of_the_suite=[
            ("lanes", "latent attention", "dualpipev", "full"),
            ("context tiles", "shared key head", "zbv", "selective"),
            ("tensor ranks", "shared key head", "zbv", "full"),
        ],
    ),
)
def test_gradients_that_are_put_off_have_the_same_bits_where_activations_are_computed_again(
    ranks: Ranks, cut: str, model: str, schedule: Any, recompute: Any
) -> None:
    fields, tensor = CUTS[cut]
    cut_model = dataclasses.replace(MODELS[model], **fields)
    axes = ParallelSpec(tensor=tensor, expert=tensor if cut_model.moe else 1)
    alone = spec_of(cut_model, axes, "none")
    parallel = dataclasses.replace(axes, pipeline=2, pipeline_schedule=schedule)
    staged = spec_of(cut_model, parallel, recompute)
    assert layout_problems(staged, 2 * tensor) == []
    result = merged(ranks.run(2 * tensor, steps_on_this_rank, staged, 1))
    assert same(result, merged(ranks.run(tensor, steps_on_this_rank, alone, 1)))

"""Parameters and collectives of single ranks of fleets that do not exist, against the closed forms."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layouts import DENSE, MIXTURE, legal_layouts
from layouts import tiny as tiny_run
from phalanx.model.facts.holdings import holding, place_of
from phalanx.parallel.collectives import collectives
from phalanx.parallel.mesh import LayoutError, build_mesh
from phalanx.parallel.torch_compat import join_fake
from phalanx.run.layout import layout_of, layout_problems
from phalanx.run.spec import ModelSpec, ParallelSpec, PrecisionSpec
from phalanx.train.measure.dry_run import Comparison, counted, dry_run, tiny
from quick_cases import quick

DRAWN = [
    (model, ranks, parallel)
    for model in (DENSE, MIXTURE)
    for ranks in (4, 8)
    for parallel, _ in legal_layouts(model, ranks)
]
BALANCED = dataclasses.replace(MIXTURE, moe=dataclasses.replace(MIXTURE.moe, aux_loss=0.01))  # type: ignore[type-var]
LAYOUTS: dict[str, tuple[ModelSpec, ParallelSpec, int]] = {
    "alone": (DENSE, ParallelSpec(), 1),
    "zero3": (DENSE, ParallelSpec(), 4),
    "zero2": (DENSE, ParallelSpec(sharding="zero2"), 4),
    "replicated": (DENSE, ParallelSpec(sharding="none"), 4),
    "hybrid": (DENSE, ParallelSpec(shard_ranks=2), 4),
    "tensor": (DENSE, ParallelSpec(tensor=2), 4),
    "copies of key heads": (dataclasses.replace(DENSE, kv_heads=2), ParallelSpec(tensor=4, pipeline=2), 8),
    "lanes": (dataclasses.replace(DENSE, lanes=4), ParallelSpec(tensor=2), 4),
    "lanes that share key heads": (
        dataclasses.replace(DENSE, heads=8, kv_heads=2, lanes=8),
        ParallelSpec(tensor=4),
        8,
    ),
    "a mixture in lanes": (
        dataclasses.replace(MIXTURE, lanes=4),
        ParallelSpec(pipeline=2, pipeline_schedule="zbv", tensor=2, expert=2),
        8,
    ),
    "ring": (DENSE, ParallelSpec(context=2), 4),
    "gathered context": (DENSE, ParallelSpec(context=4, context_mode="allgather"), 8),
    "a mixture in context tiles": (
        dataclasses.replace(BALANCED, context_tiles=4),
        ParallelSpec(pipeline=2, context=2, context_mode="allgather", expert=2),
        4,
    ),
    "lanes that share key heads, in context tiles": (
        dataclasses.replace(DENSE, heads=8, kv_heads=2, lanes=4, context_tiles=4),
        ParallelSpec(tensor=4, context=2, context_mode="allgather"),
        8,
    ),
    "a mixture in lanes and context tiles": (
        dataclasses.replace(BALANCED, lanes=2, context_tiles=4),
        ParallelSpec(tensor=2, context=2, context_mode="allgather", expert=4),
        8,
    ),
    "predictions ahead over context": (
        dataclasses.replace(DENSE, mtp_depth=2),
        ParallelSpec(context=2, context_mode="allgather"),
        4,
    ),
    "predictions ahead in lanes and context tiles": (
        dataclasses.replace(DENSE, lanes=2, context_tiles=4, mtp_depth=2),
        ParallelSpec(tensor=2, context=2, context_mode="allgather"),
        4,
    ),
    "gpipe": (DENSE, ParallelSpec(pipeline=4, pipeline_schedule="gpipe", sharding="zero2"), 8),
    "1f1b": (DENSE, ParallelSpec(pipeline=4), 8),
    "interleaved": (DENSE, ParallelSpec(pipeline=2, pipeline_schedule="interleaved"), 4),
    "zbv with tensor": (MIXTURE, ParallelSpec(pipeline=2, pipeline_schedule="zbv", tensor=2), 8),
    "dualpipev with a team": (MIXTURE, ParallelSpec(pipeline=2, pipeline_schedule="dualpipev", expert=4), 8),
    "divided experts": (MIXTURE, ParallelSpec(expert=4, expert_tensor=2, tensor=2), 8),
    "experts over context": (BALANCED, ParallelSpec(expert=2, context=2, tensor=2), 8),
}


def differing(comparison: Comparison) -> dict[object, tuple[int, int]]:
    """The derived and the counted numbers that differ."""
    return {
        key: pair for key, pair in {**comparison.elements, **comparison.calls}.items() if pair[0] != pair[1]
    }


@pytest.mark.parametrize(
    "name",
    quick(
        LAYOUTS,
        of_the_suite=[
            "alone",
            "hybrid",
            "copies of key heads",
            "a mixture in lanes",
            "gathered context",
            "a mixture in context tiles",
        ],
    ),
)
def test_a_rank_holds_and_calls_what_the_closed_forms_give(name: str) -> None:
    model, parallel, ranks = LAYOUTS[name]
    for rank in {0, ranks // 2, ranks - 1}:
        comparison = dry_run(tiny_run(model, parallel), ranks, rank)
        assert comparison.matches, differing(comparison)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(DRAWN),
    st.integers(0, 7),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(["reproducible", "integer", "fast"]),
)
def test_so_it_does_on_any_layout(
    drawn: tuple[ModelSpec, int, ParallelSpec], at: int, compute: str, reduction: str
) -> None:
    model, ranks, parallel = drawn
    spec = tiny_run(model, parallel)
    spec = dataclasses.replace(
        spec,
        precision=PrecisionSpec(compute=compute),  # type: ignore[arg-type]
        train=dataclasses.replace(spec.train, reduction=reduction),
    )
    assume(not layout_problems(spec, ranks))  # ZeRO-1 has no integer sums
    comparison = dry_run(spec, ranks, at % ranks)
    assert comparison.matches, differing(comparison)


def test_what_a_slot_calls_is_proportional_to_micro_batches_and_rounds() -> None:
    spec = tiny_run(DENSE, ParallelSpec(tensor=2, pipeline=2))
    layout = layout_of(spec.parallel, 8)
    single, double = (tiny(spec, 8, rounds) for rounds in (1, 2))
    calls = [collectives(s, layout, holding(s, layout, place_of(layout, 0))) for s in (single, double)]
    for key in (("tensor", "all_gather"), ("pipeline", "send"), ("fsdp", "all_gather")):
        assert calls[1][key] == 2 * calls[0][key]
    assert calls[1]["all", "all_reduce"] == calls[0]["all", "all_reduce"]


@pytest.mark.parametrize(("sharding", "times"), [("zero2", 2), ("zero1", 1)])
def test_gradients_are_exchanged_after_every_slot_or_by_zero1_once_a_step(
    sharding: Literal["zero1", "zero2"], times: int
) -> None:
    parallel = ParallelSpec(sharding=sharding)
    spec = tiny(tiny_run(DENSE, parallel), 2, rounds=2)
    layout = layout_of(parallel, 2)
    derived = collectives(spec, layout, holding(spec, layout, place_of(layout, 0)))
    join_fake(0, 2)
    try:
        assert counted(spec, build_mesh(spec, 2, torch.device("cpu"))) == derived
    finally:
        dist.destroy_process_group()
    assert derived["fsdp", "all_to_all"] == times * derived["fsdp", "all_gather"]


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="multiple of 3"):
        dry_run(tiny_run(DENSE, ParallelSpec(pipeline=3)), 4, 0)

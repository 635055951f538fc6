"""A model divided over any legal combination of axes computes what one process computes.

The layouts are not picked: from all legal ones, a set is chosen in which every pair of degrees of two axes that can occur
together occurs, and hypothesis draws further ones with other schedules.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layouts
from covering import covering, new_choices_first
from layouts import DENSE, MIXTURE, Whole, legal_layouts, merged, steps_on_this_rank, worst_error
from phalanx.run.layout import Layout, layout_problems
from phalanx.run.spec import ModelSpec, ParallelSpec, PrecisionSpec, RunSpec
from ranks import Ranks

MODELS = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "ahead": dataclasses.replace(DENSE, layers=1, mtp_depth=2),
}
STEPS = 1
GOAL = 4e-6
"""Largest error of loss and gradients, relative to the largest element of each, in fp32: few tokens leave some gradients small."""


def tiny(model: ModelSpec, parallel: ParallelSpec) -> RunSpec:
    """A run with two micro-batches to a slot."""
    return layouts.tiny(model, parallel, batch_size=8)


@functools.cache
def everything(model: str, most_ranks: int) -> tuple[tuple[int, ParallelSpec, Layout], ...]:
    return tuple(
        (ranks, parallel, layout)
        for ranks in (1, 2, 4, 8)
        if ranks <= most_ranks
        for parallel, layout in legal_layouts(MODELS[model], ranks)
    )


Case = tuple[int, ParallelSpec, Layout]


def choices(case: Case) -> list[tuple[str, object]]:
    """Return the degrees of a layout, and its sharding."""
    _, parallel, layout = case
    return [*dataclasses.asdict(layout).items(), ("sharding", parallel.sharding)]


def cases(model: str, most_ranks: int) -> list[Case]:
    """Return few legal layouts in which every two choices meet that can."""
    return covering(everything(model, most_ranks), choices, cost=lambda case: case[0])


def for_the_suite(model: str, most_ranks: int) -> list[object]:
    """Return the cases as parameters: those without a new choice are slow, and those of four ranks are a campaign."""
    chosen = new_choices_first(
        [(ranks, parallel) for ranks, parallel, _ in cases(model, most_ranks)],
        lambda case: [(field.name, getattr(case[1], field.name)) for field in dataclasses.fields(case[1])],
    )
    return [pytest.param(case, marks=pytest.mark.servers) if case[0] == 4 else case for case in chosen]


def named(case: tuple[int, ParallelSpec]) -> str:
    ranks, parallel = case
    default = ParallelSpec()
    changes = (
        f"{field.name}={getattr(parallel, field.name)}"
        for field in dataclasses.fields(parallel)
        if getattr(parallel, field.name) != getattr(default, field.name)
    )
    return f"{ranks} ranks, {', '.join(changes)}"


@pytest.fixture(scope="module")
def references(ranks: Ranks) -> dict[tuple[str, ParallelSpec], Whole]:
    """The result of each model on one process, and on the fewest data-parallel ranks of each division."""
    return {
        (name, ParallelSpec()): merged(ranks.run(1, steps_on_this_rank, tiny(model, ParallelSpec()), STEPS))
        for name, model in MODELS.items()
    }


def check(
    ranks: Ranks,
    references: dict[tuple[str, ParallelSpec], Whole],
    model: str,
    count: int,
    parallel: ParallelSpec,
) -> None:
    result = merged(ranks.run(count, steps_on_this_rank, tiny(MODELS[model], parallel), STEPS))
    assert worst_error(result, references[model, ParallelSpec()]) <= GOAL
    # Bits may depend on how sums are split, but on nothing that the fleet decides.
    division = dataclasses.replace(
        parallel, sharding="zero3", shard_ranks=0, pipeline=1, pipeline_schedule="1f1b"
    )
    same = references.setdefault((model, division), result)
    assert (result.losses, result.norms, result.weights_sha256) == (
        same.losses,
        same.norms,
        same.weights_sha256,
    )


@pytest.mark.parametrize("case", for_the_suite("dense", 4), ids=named)
def test_a_dense_model_is_the_same_on_every_layout(
    ranks: Ranks, references: dict[tuple[str, ParallelSpec], Whole], case: tuple[int, ParallelSpec]
) -> None:
    check(ranks, references, "dense", *case)


@pytest.mark.parametrize("mode", ["ring", pytest.param("allgather", marks=pytest.mark.slow)])
def test_predictions_ahead_are_the_same_where_their_tokens_are_other_ranks(
    ranks: Ranks,
    references: dict[tuple[str, ParallelSpec], Whole],
    mode: Literal["ring", "allgather"],
) -> None:
    tensor = 2 if mode == "allgather" else 1
    check(ranks, references, "ahead", 4, ParallelSpec(context=4 // tensor, tensor=tensor, context_mode=mode))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("dense", ParallelSpec(tensor=2), marks=pytest.mark.slow),
        pytest.param(
            *("dense", ParallelSpec(pipeline=2, pipeline_schedule="zbv", sharding="none")),
            marks=pytest.mark.slow,
        ),
        ("mixture", ParallelSpec(context=2, expert=2, sharding="zero2")),
    ],
    ids=str,
)
def test_sums_in_integers_are_the_same_on_every_fleet_of_a_division(
    ranks: Ranks, model: str, parallel: ParallelSpec
) -> None:
    stages = parallel.pipeline > 1
    shallow = MODELS[model] if stages else dataclasses.replace(MODELS[model], layers=2)
    reference = merged(ranks.run(1, steps_on_this_rank, tiny(shallow, ParallelSpec()), STEPS))
    spec = tiny(shallow, parallel)
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, reduction="integer"))
    two, four = (merged(ranks.run(count, steps_on_this_rank, spec, STEPS)) for count in (2, 4))
    assert worst_error(two, reference) <= GOAL
    assert (two.losses, two.norms, two.weights_sha256) == (four.losses, four.norms, four.weights_sha256)


@pytest.mark.parametrize("parallel", [ParallelSpec(tensor=2), ParallelSpec(pipeline=2)], ids=str)
def test_norms_on_both_sides_of_a_layer_are_the_same_on_ranks_that_share_its_sequence(
    ranks: Ranks, parallel: ParallelSpec
) -> None:
    # Without biases of keys, whose gradients cancel but for rounding.
    model = dataclasses.replace(DENSE, layers=2, norm_placement="both", qkv_bias=False)
    alone, two = (
        merged(ranks.run(count, steps_on_this_rank, tiny(model, layout), STEPS))
        for count, layout in ((1, ParallelSpec()), (2, parallel))
    )
    assert worst_error(two, alone) <= GOAL


@pytest.mark.parametrize(
    ("key_heads", "parallel"),
    [
        (2, ParallelSpec(tensor=4)),
        (1, ParallelSpec(tensor=2, context=2)),
        pytest.param(2, ParallelSpec(tensor=4, sharding="none"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tensor_ranks_that_share_a_key_head_compute_what_one_process_computes(
    ranks: Ranks, key_heads: int, parallel: ParallelSpec
) -> None:
    # Without biases of keys, whose gradients cancel but for rounding.
    model = dataclasses.replace(DENSE, layers=2, kv_heads=key_heads, qkv_bias=False)
    alone, four = (
        merged(ranks.run(count, steps_on_this_rank, tiny(model, layout), STEPS))
        for count, layout in ((1, ParallelSpec()), (4, parallel))
    )
    assert worst_error(four, alone) <= GOAL


@pytest.mark.parametrize("case", for_the_suite("mixture", 4), ids=named)
def test_a_mixture_of_experts_is_the_same_on_every_layout(
    ranks: Ranks, references: dict[tuple[str, ParallelSpec], Whole], case: tuple[int, ParallelSpec]
) -> None:
    check(ranks, references, "mixture", *case)


@pytest.mark.parametrize(
    ("compute", "layouts"),
    [
        ("fp32", (ParallelSpec(sharding="none"), ParallelSpec(expert=2), ParallelSpec(expert=4))),
        pytest.param(
            "bf16",
            (
                ParallelSpec(sharding="none"),
                ParallelSpec(expert=2, pipeline=2, pipeline_schedule="zbv"),
                ParallelSpec(expert=4, sharding="zero2"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fp32", "bf16"],
)
def test_experts_dealt_over_any_number_of_ranks_have_the_same_bits(
    ranks: Ranks, compute: Literal["fp32", "bf16"], layouts: tuple[ParallelSpec, ...]
) -> None:
    outcomes = set()
    model = dataclasses.replace(MIXTURE, layers=4 if any(each.pipeline > 1 for each in layouts) else 2)
    for parallel in layouts:
        spec = tiny(model, parallel)
        train = dataclasses.replace(spec.train, expert_sums="slot")
        spec = dataclasses.replace(spec, train=train, precision=PrecisionSpec(compute=compute))
        result = merged(ranks.run(4, steps_on_this_rank, spec, 2))
        outcomes.add((result.losses, result.norms, result.weights_sha256))
    assert len(outcomes) == 1


def test_weight_gradients_that_are_put_off_have_the_same_bits_where_a_slot_is_one_micro_batch_in_bf16(
    ranks: Ranks,
) -> None:
    outcomes = set()
    for schedule in ("1f1b", "zbv"):
        spec = tiny(DENSE, ParallelSpec(pipeline=2, pipeline_schedule=schedule))  # type: ignore[arg-type]
        spec = dataclasses.replace(
            spec,
            train=dataclasses.replace(spec.train, micro_batch_size=2),
            precision=PrecisionSpec(compute="bf16"),
        )
        result = merged(ranks.run(4, steps_on_this_rank, spec, 1))
        outcomes.add((result.losses, result.norms, result.weights_sha256))
    assert len(outcomes) == 1


@st.composite
def drawn_layouts(draw: st.DrawFn) -> tuple[str, int, ParallelSpec]:
    model = draw(st.sampled_from(sorted(MODELS)))
    ranks, parallel, _ = draw(st.sampled_from(everything(model, 4)))
    if parallel.pipeline > 1:
        schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")))
        parallel = dataclasses.replace(parallel, pipeline_schedule=schedule)
    if parallel.context > 1:
        parallel = dataclasses.replace(parallel, context_mode=draw(st.sampled_from(("ring", "allgather"))))
    return model, ranks, parallel


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
@given(
    drawn=drawn_layouts().filter(
        lambda drawn: not layout_problems(tiny(MODELS[drawn[0]], drawn[2]), drawn[1])
    )
)
def test_any_layout_with_any_schedule_is_the_same(
    ranks: Ranks,
    references: dict[tuple[str, ParallelSpec], Whole],
    drawn: tuple[str, int, ParallelSpec],
) -> None:
    model, count, parallel = drawn
    check(ranks, references, model, count, parallel)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_eight_ranks_compute_the_same_on_layouts_of_every_pair_of_axes(
    ranks: Ranks, references: dict[tuple[str, ParallelSpec], Whole], model: str
) -> None:
    for count, parallel, _ in cases(model, 8):
        if count == 8:
            check(ranks, references, model, count, parallel)

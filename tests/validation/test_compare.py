"""Comparison with published runs: arithmetic of errors, factors and regret, and rows that are left out."""

from __future__ import annotations

import dataclasses
import itertools
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.compare import Prediction, Validation, errors, fits, kendall_tau, outcome_of, sweeps, validate
from validation.document import document, goals
from validation.factors import CalibrationPoint, scalar_for, scalars
from validation.runs import PublishedRun, read_published

from .test_runs import GPT3, LLAMA_8B, row


def several() -> tuple[PublishedRun, ...]:
    """Three models, one of them in two layouts, one that did not fit, and one that states too little."""
    return (
        row(GPT3),
        row(GPT3, id="gpt3-tp4", tp="4", pp="24", tokens_per_s_per_gpu="110"),
        row(
            LLAMA_8B,
            tokens_per_s_per_gpu="8000",
            memory_gb="60",
            memory_meter="device",
            memory_unit="1000 MiB",
        ),
        row(
            LLAMA_8B, id="one-layer-rank", tokens_per_s_per_gpu="", gpus="1", dp="1", outcome="out of memory"
        ),
        row(GPT3, id="too-little", layers=""),
    )


@lru_cache(maxsize=1)
def validated() -> Validation:
    return validate(several(), calibration=())


def test_every_row_has_an_outcome_in_order() -> None:
    assert [outcome.run.id for outcome in validated().outcomes] == [run.id for run in several()]


def test_the_prediction_is_the_sum_of_its_terms() -> None:
    for outcome in validated().timed():
        assert outcome.time is not None
        assert sum(outcome.time.terms.values()) == pytest.approx(outcome.time.predicted_s)


def test_an_excluded_row_has_a_reason_and_no_prediction() -> None:
    outcome = validated().outcomes[-1]
    assert "layers" in outcome.excluded
    assert (outcome.time, outcome.estimate) == (None, None)


def test_a_layout_that_the_planner_refuses_is_excluded_with_its_words() -> None:
    outcome = outcome_of(row(GPT3, vpp="20"))
    assert "the planner cannot express it: 12 x 20 stages for 96 layers" in outcome.excluded


def test_sixteen_gigabytes_a_billion_parameters_do_not_fit_on_one_accelerator() -> None:
    counts = fits(validated().outcomes)
    assert (counts.ran_out, counts.ran_out_predicted) == (1, 1)


def test_memory_of_the_whole_device_counts_contexts_too() -> None:
    outcome = next(outcome for outcome in validated().outcomes if outcome.memory)
    assert outcome.memory is not None
    assert outcome.estimate is not None
    assert outcome.memory.basis == "device"
    assert outcome.memory.predicted_bytes == outcome.estimate.memory_bytes
    assert outcome.memory.measured_bytes == 60_000 * 2**20  # nvidia-smi prints MiB


@pytest.mark.parametrize("figures", [{}, {"tokens_per_s_per_gpu": ""}])
def test_a_memory_of_zero_is_one_that_is_not_stated(figures: dict[str, str]) -> None:
    outcome = outcome_of(row(GPT3, memory_gb="0", **figures))
    assert outcome.memory is None
    assert bool(outcome.excluded) == bool(figures)


points = st.builds(
    CalibrationPoint,
    software=st.sampled_from("ab"),
    accelerator=st.sampled_from(("h100", "a100")),
    model=st.sampled_from("xyz"),
    configuration=st.sampled_from("pq"),
    ratio=st.floats(0.1, 10),
)


@given(run=points, others=st.lists(points), ratio=st.floats(0.1, 10))
def test_a_factor_does_not_depend_on_runs_of_the_model_that_it_is_for(
    run: CalibrationPoint, others: list[CalibrationPoint], ratio: float
) -> None:
    own = dataclasses.replace(run, ratio=ratio)
    factor = scalar_for(run, others)
    assert scalar_for(run, [*others, own]) == factor
    if factor.scope in ("stack and generation", "stack"):
        assert scalar_for(run, [*others, dataclasses.replace(own, configuration="r")]) == factor


@given(run=points, others=st.lists(points, min_size=1), times=st.floats(0.1, 10))
def test_a_stack_that_is_slower_by_a_factor_has_a_factor_larger_by_it(
    run: CalibrationPoint, others: list[CalibrationPoint], times: float
) -> None:
    slower = [dataclasses.replace(p, ratio=p.ratio * times) for p in others]
    before, after = scalar_for(run, others), scalar_for(run, slower)
    assert before.scope == after.scope
    # Drawn towards one as if two more models had been predicted rightly; other configurations of the model are taken as they are.
    share = before.models / (before.models + 2) if before.scope.startswith("stack") else 1
    expected = before.value * (times**share if before.runs else 1)
    assert after.value == pytest.approx(expected)


def test_each_model_has_one_vote_however_many_runs_it_has() -> None:
    many = [CalibrationPoint("a", "h100", "x", "", 2.0)] * 10 + [
        CalibrationPoint("a", "h100", "y", "", 1.0),
        CalibrationPoint("a", "h100", "z", "", 1.0),
    ]
    assert scalars(many)["a on hopper, dense"].value == 1.0


def test_without_runs_on_the_same_generation_the_same_software_elsewhere_serves() -> None:
    run = CalibrationPoint("a", "h100", "x", "", 1.0)
    elsewhere = scalar_for(
        run, [CalibrationPoint("a", "a100", "x", "", 1.2**3), CalibrationPoint("b", "h100", "y", "", 9.0)]
    )
    assert (elsewhere.value, elsewhere.scope) == (pytest.approx(1.2), "stack")
    assert scalar_for(run, [CalibrationPoint("b", "h100", "y", "", 9.0)]).scope == "none"


def test_accelerators_of_one_generation_share_a_factor_and_mixtures_have_their_own() -> None:
    run = CalibrationPoint("a", "gb200", "x", "", 1.0)
    near, dense = (
        CalibrationPoint("a", "b300", "y", "", 2.0**3),
        CalibrationPoint("a", "gb200", "z", "", 0.1, mixture=True),
    )
    assert scalar_for(run, [near, dense]).value == pytest.approx(2.0)


def test_a_stack_known_from_one_model_learns_from_its_other_configurations_and_is_marked() -> None:
    run, other = (
        CalibrationPoint("a", "h100", "x", "256", 1.0),
        CalibrationPoint("a", "h100", "x", "512", 1.2),
    )
    factor = scalar_for(run, [run, other])
    assert (factor.value, factor.scope) == (pytest.approx(1.2), "other configurations of the model")


def test_rows_of_calibration_move_factors_but_are_not_reported() -> None:
    alone = validate((row(GPT3),), calibration=())
    helped = validate((row(GPT3),), calibration=(row(LLAMA_8B, tokens_per_s_per_gpu="8000"),))
    assert len(helped.outcomes) == 1
    first, second = alone.outcomes[0].time, helped.outcomes[0].time
    assert first is not None
    assert second is not None
    assert (first.scalar.scope, second.scalar.scope) == ("none", "stack and generation")
    assert first.predicted_s == second.predicted_s


@given(values=st.lists(st.floats(-2, 2), min_size=1, max_size=9))
def test_the_worst_error_is_at_least_the_median(values: list[float]) -> None:
    summary = errors(values)
    assert summary is not None
    assert abs(summary.worst) >= summary.median >= abs(summary.bias) - 4
    assert summary.count == len(values)


def test_no_errors_have_no_summary() -> None:
    assert errors([]) is None


@given(order=st.permutations(range(6)))
def test_kendalls_tau_counts_the_swaps_that_sorting_needs(order: list[int]) -> None:
    pairs = [(float(place), float(value)) for place, value in enumerate(order)]
    inversions = sum(a > b for a, b in itertools.combinations(order, 2))
    assert kendall_tau(pairs) == pytest.approx(1 - 4 * inversions / (6 * 5))


def test_regret_is_the_measured_price_of_the_planners_choice() -> None:
    choices = sweeps(validated().outcomes)
    assert [sweep.layouts for sweep in choices] == [2]
    first, second = validated().outcomes[:2]
    assert first.time is not None
    assert second.time is not None
    chosen = first.time if first.time.predicted_s < second.time.predicted_s else second.time
    best = min(first.time.measured_s, second.time.measured_s)
    assert choices[0].regret == pytest.approx(chosen.measured_s / best - 1)


def test_other_predictions_choose_other_layouts() -> None:
    outcomes = validated().outcomes
    timed = [outcome for outcome in outcomes if outcome.time is not None][:2]
    regrets = []
    for favored in timed:
        predicted = {
            outcome.run.id: Prediction(1.0 if outcome is favored else 2.0, 0.5, 1.0) for outcome in timed
        }
        regrets.append(sweeps(outcomes, predicted)[0].regret)
    assert min(regrets) == 0.0
    assert max(regrets) == pytest.approx(2 * sweeps(outcomes)[0].mean_regret)


@pytest.mark.parametrize(
    ("memory", "chosen"),
    [
        ((0.5, 0.5), 0),  # both fit: the faster one
        ((1.1, 0.5), 1),  # the faster one is predicted not to fit
        ((1.2, 1.1), 0),  # neither is: by time
        ((0.99, 0.5), 1),  # it hardly fits, and the other is as fast within the error
    ],
)
def test_a_layout_is_chosen_as_a_plan_chooses_it(memory: tuple[float, float], chosen: int) -> None:
    outcomes = [outcome for outcome in validated().outcomes if outcome.time is not None][:2]
    predicted = {
        outcome.run.id: Prediction(step_s, bytes_, 1.0)
        for outcome, step_s, bytes_ in zip(outcomes, (1.0, 1.02), memory, strict=True)
    }
    (sweep,) = sweeps(outcomes, predicted)
    times = [outcome.time.measured_s for outcome in outcomes if outcome.time is not None]
    assert sweep.regret == pytest.approx(times[chosen] / min(times) - 1)
    assert sweep.regret_by_time == pytest.approx(times[0] / min(times) - 1)


def test_layouts_that_recompute_different_parts_are_different_layouts() -> None:
    rows = tuple(
        row(GPT3, id=part, recompute=f"selective({part})", tokens_per_s_per_gpu=rate)
        for part, rate in (("core_attn", "100"), ("mlp", "90"))
    )
    (sweep,) = sweeps(validate(rows, calibration=()).outcomes)
    assert sweep.layouts == 2


def test_a_goal_without_evidence_is_not_met() -> None:
    nothing = validate((row(GPT3, layers=""),), calibration=())
    assert {goal.reached for goal in goals(nothing)} == {None}
    assert not any(goal.met for goal in goals(nothing))


def test_the_document_names_every_row_and_every_missed_goal() -> None:
    text = document(validated())
    assert all(f"`{run.id}`" in text for run in several() if not run.ran_out_of_memory)
    for goal in goals(validated()):
        assert goal.name in text


@pytest.mark.slow
def test_the_packages_table_is_predicted_within_the_right_order_of_magnitude() -> None:
    rows = read_published()[::12]
    summary = errors(outcome.time.error for outcome in validate(rows, calibration=()).timed() if outcome.time)
    assert summary is not None
    assert summary.median < 0.5

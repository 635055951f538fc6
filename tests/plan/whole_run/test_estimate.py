"""The run as a whole: sums, orders, limits, and the runs whose level of goodput was published."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_clusters import h100s, with_rates
from phalanx.run.spec import CheckpointSpec, FleetSpec, RunSpec
from phalanx_plan.evidence import EXACT, Band, normal_band
from phalanx_plan.whole_run.assumptions import (
    MOST_SECONDS,
    RunAssumptions,
    RunEstimateError,
    RunInputs,
    assumed,
)
from phalanx_plan.whole_run.estimate import RunEstimate, estimate_run, goodput_plan
from phalanx_plan.whole_run.failures import classes_at_node_rate

FEW = RunAssumptions(draws=20)
METHODS = ("spare", "shrink", "restart")
SOON = 150e9
"""Tokens of a run of which only the mean is needed, which is in proportion to them: few failures are simulated."""


def trillion(accelerators: int = 100_000, **changes: object) -> RunInputs:
    """1T parameters on 15T tokens at 40 % of the peak, batches of 16M tokens."""
    step_s = 6 * 1e12 * 16e6 / (0.4 * 989.5e12 * accelerators)
    inputs = RunInputs(
        cluster=h100s(accelerators),
        step_s=step_s,
        tokens_per_step=16e6,
        tokens=15e12,
        checkpoint_bytes=14e12,
        accelerators=accelerators,
        replicas=max(1, accelerators // 128),
    )
    return replace(inputs, **changes)  # type: ignore[arg-type]


def parts_sum_to_totals(run: RunEstimate) -> bool:
    values = run.to_dict()
    energy, cost = values["energy"], values["cost"]
    sums = [
        (sum(run.breakdown.values()), 1.0),
        (sum(v for k, v in energy.items() if k != "total_kwh"), energy["total_kwh"]),
        (sum(v for k, v in cost.items() if k != "total_usd"), cost["total_usd"]),
    ]
    return all(math.isclose(left, right, rel_tol=1e-9) for left, right in sums)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accelerators", [8, 1024, 100_000])
def test_the_parts_of_every_breakdown_sum_to_its_total(method: str, accelerators: int) -> None:
    assert parts_sum_to_totals(estimate_run(trillion(accelerators), replace(FEW, recovery=method)))  # type: ignore[arg-type]


def test_an_estimate_is_json_with_every_assumption_and_source_in_it() -> None:
    values = json.loads(json.dumps(estimate_run(trillion(), FEW).to_dict(), allow_nan=False))
    assert values["assumptions"]["recovery"] == "spare"
    assert values["assumptions"]["failure_classes"][0]["source"]
    assert "correlated.leaf switch" in values["sources"]
    assert all(values["sources"].values())


def test_the_same_inputs_give_the_same_estimate() -> None:
    assert estimate_run(trillion(), FEW) == estimate_run(trillion(), FEW)


def test_a_perfect_fleet_takes_steps_times_step_time() -> None:
    inputs = trillion(checkpoint_bytes=0.0)
    nothing_fails = RunAssumptions(failure_classes=(), planned_pauses_per_day=0, draws=5)
    run = estimate_run(inputs, nothing_fails)
    assert run.goodput == pytest.approx(1)
    assert run.days == pytest.approx(run.failure_free_days)
    assert run.finish_days.p5 == run.finish_days.p95 == pytest.approx(run.failure_free_days)
    assert run.steps == math.ceil(15e12 / 16e6)
    assert run.spare_nodes == 0
    assert math.isinf(run.mtti_s)


@pytest.mark.parametrize("method", METHODS)
def test_with_the_rate_known_the_simulated_mean_agrees_with_the_closed_form(method: str) -> None:
    classes = tuple(
        replace(failure_class, low=failure_class.typical, high=failure_class.typical)
        for failure_class in RunAssumptions().failure_classes
    )
    assumptions = RunAssumptions(recovery=method, failure_classes=classes, draws=300)  # type: ignore[arg-type]
    run = estimate_run(trillion(), assumptions)
    assert run.finish_days.mean == pytest.approx(run.days, rel=0.01)


def test_percentiles_are_in_order_and_wider_when_the_step_time_is_uncertain() -> None:
    sure, unsure = (
        estimate_run(trillion(), RunAssumptions(step_time_band=normal_band(sd), draws=200))
        for sd in (0.0, 0.1)
    )
    for run in (sure, unsure):
        assert run.failure_free_days * 0.7 < run.finish_days.p5 < run.finish_days.p50 < run.finish_days.p95
        assert run.goodput_by_level["low"] > run.goodput_by_level["typical"] > run.goodput_by_level["high"]
    width = [run.finish_days.p95 - run.finish_days.p5 for run in (sure, unsure)]
    assert width[1] > 3 * width[0]


def test_percentiles_of_twenty_runs_are_the_first_the_tenth_and_the_nineteenth() -> None:
    band = normal_band(0.1)
    nothing_fails = RunAssumptions(
        failure_classes=(), planned_pauses_per_day=0, step_time_band=band, draws=20
    )
    run = estimate_run(trillion(checkpoint_bytes=0.0), nothing_fails)
    for at, rank in (("p5", 1), ("p50", 10), ("p95", 19)):
        ratio = float(band.at(np.array([NormalDist().inv_cdf((rank - 0.5) / 20)]))[0])
        assert getattr(run.finish_days, at) == pytest.approx(ratio * run.failure_free_days)


def test_days_and_money_without_failures_have_the_band_of_the_step_time() -> None:
    band = Band((0.8, 0.9, 0.95, 1.0, 1.2, 1.5, 2.0))
    nothing_fails = RunAssumptions(failure_classes=(), planned_pauses_per_day=0, step_time_band=band)
    run = estimate_run(trillion(checkpoint_bytes=0.0), nothing_fails)
    for at in ("p5", "p50", "p95"):
        ratio = getattr(band, at)
        assert getattr(run.finish_days, at) == pytest.approx(ratio * run.failure_free_days, rel=0.01)
        assert getattr(run.usd, at) == pytest.approx(ratio * run.cost.total_usd, rel=0.01)
        assert getattr(run.energy_kwh, at) == pytest.approx(ratio * run.energy.total_kwh, rel=0.01)


def test_a_spare_beats_a_smaller_fleet_and_a_restart() -> None:
    spare, shrink, restart = (estimate_run(trillion(), replace(FEW, recovery=m)) for m in METHODS)  # type: ignore[arg-type]
    assert spare.goodput > shrink.goodput > restart.goodput
    assert spare.spare_nodes > shrink.spare_nodes == 0


bandwidths = st.sampled_from(["storage", "fabric", "host"])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(METHODS), bandwidths, st.floats(1.0, 8.0), st.floats(1e12, 1e15))
def test_more_bandwidth_never_delays_the_run(
    method: str, link: str, times: float, state_bytes: float
) -> None:
    assumptions = replace(FEW, recovery=method, draws=1)  # type: ignore[arg-type]
    now = trillion(checkpoint_bytes=state_bytes, tokens=SOON)
    then = replace(now, cluster=with_rates(now.cluster, **{link: times}))
    # Whole steps make the interval jump by half a step at most.
    assert estimate_run(then, assumptions).days <= estimate_run(now, assumptions).days * (1 + 1e-3)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(METHODS), st.floats(0.5, 10), st.floats(1.0, 5.0))
def test_a_fleet_that_fails_more_often_takes_no_less_time_and_money(
    method: str, rate: float, times: float
) -> None:
    def run(per_1000_node_days: float) -> RunEstimate:
        classes = classes_at_node_rate(per_1000_node_days)
        assumptions = RunAssumptions(recovery=method, failure_classes=classes, draws=1)  # type: ignore[arg-type]
        return estimate_run(trillion(16_384, tokens=SOON), assumptions)

    few, many = run(rate), run(rate * times)
    assert many.days >= few.days * (1 - 1e-3)
    assert many.cost.total_usd >= few.cost.total_usd * (1 - 1e-3)
    assert many.spare_nodes >= few.spare_nodes


@settings(max_examples=20, deadline=None)
@given(st.floats(1e11, 2e12), st.floats(1.0, 4.0))
def test_more_tokens_take_more_days_and_kilowatt_hours_in_proportion(tokens: float, times: float) -> None:
    assumptions = replace(FEW, draws=1)
    few = estimate_run(trillion(16_384, tokens=tokens), assumptions)
    many = estimate_run(trillion(16_384, tokens=tokens * times), assumptions)
    assert many.days / few.days == pytest.approx(many.steps / few.steps)
    assert many.energy.total_kwh / few.energy.total_kwh == pytest.approx(many.steps / few.steps)


def test_saves_that_stop_the_training_are_made_less_often_and_cost_more() -> None:
    behind, blocking = (
        estimate_run(trillion(16_384), replace(FEW, recovery="restart", asynchronous_saves=mode))
        for mode in (True, False)
    )
    assert blocking.interval_s > behind.interval_s
    assert blocking.goodput < behind.goodput


def test_a_users_interval_is_kept_and_is_no_better_than_the_best() -> None:
    hourly = replace(FEW, recovery="restart", checkpoint_interval_s=3600.0)
    run = estimate_run(trillion(), hourly)
    assert run.interval_s == 3600.0
    assert run.goodput < estimate_run(trillion(), replace(hourly, checkpoint_interval_s=None)).goodput


def test_the_durable_saves_are_whole_intervals_apart_and_have_time_to_drain() -> None:
    inputs = trillion(checkpoint_bytes=1e16)
    plan = goodput_plan(inputs, RunAssumptions(), "typical")
    assert plan.rare_interval_s / plan.interval_s == pytest.approx(
        round(plan.rare_interval_s / plan.interval_s)
    )
    assert plan.rare_interval_s >= 1e16 / 2e12


def test_llama_3_comes_out_above_90_percent_as_its_authors_report() -> None:
    """arXiv:2407.21783: over 90 % effective with restarts from storage, 16,384 H100, 5.5 TB of checkpoint, 54
    days."""
    llama = RunInputs(
        cluster=h100s(16_384),
        step_s=6 * 405e9 * 16.8e6 / (400e12 * 16_384),
        tokens_per_step=16.8e6,
        tokens=15.6e12,
        checkpoint_bytes=5.5e12,
        accelerators=16_384,
    )
    run = estimate_run(llama, RunAssumptions(recovery="restart", draws=200))
    assert 0.90 < run.goodput < 0.98
    assert run.failures / run.days * 54 == pytest.approx(419, rel=1e-6)


def test_a_hopeless_run_is_reported_as_endless_and_still_is_json() -> None:
    """A restart of minutes on a fleet that fails every few seconds."""
    assumptions = replace(FEW, recovery="restart", failure_classes=classes_at_node_rate(50_000))
    run = estimate_run(trillion(), assumptions)
    assert math.isinf(run.finish_days.p50)
    assert "would not finish" in " ".join(run.warnings)
    assert json.dumps(run.to_dict(), allow_nan=False)


def test_hosts_too_small_for_the_copies_and_storage_too_slow_are_warned_of() -> None:
    run = estimate_run(trillion(8, tokens=16e6, checkpoint_bytes=14e12), FEW)
    assert any("host" in warning for warning in run.warnings)
    slow = trillion()
    slow = replace(slow, cluster=with_rates(slow.cluster, storage=1e-5))
    assert any("storage must write faster" in warning for warning in estimate_run(slow, FEW).warnings)
    assert not estimate_run(trillion(), FEW).warnings


def test_what_the_user_sets_is_named_as_his() -> None:
    sources = estimate_run(trillion(), replace(FEW, grid_kg_per_kwh=0.05)).sources
    assert sources["grid"] == "set by the user"
    assert "eGRID" in estimate_run(trillion(), FEW).sources["grid"]


def test_impossible_quantities_are_refused_by_name() -> None:
    with pytest.raises(RunEstimateError, match="step_s"):
        trillion(step_s=0.0)
    with pytest.raises(RunEstimateError, match="snapshot_overlap"):
        RunAssumptions(snapshot_overlap=2)
    with pytest.raises(RunEstimateError, match="repair_s"):
        RunAssumptions(repair_s=-1)
    with pytest.raises(RunEstimateError, match="draws"):
        RunAssumptions(draws=0)


def test_what_a_user_assumes_of_the_run_takes_the_place_of_the_default() -> None:
    assumptions = assumed(
        ("recovery=restart", "repair_s=60", "electricity_in_price=false", "pue=1.5", "draws=7"),
        normal_band(0.1),
    )
    usual = RunAssumptions(step_time_band=normal_band(0.1))
    assert assumptions == replace(
        usual, recovery="restart", repair_s=60.0, electricity_in_price=False, pue=1.5, draws=7
    )


def test_a_fleet_s_own_rate_of_failures_can_be_assumed() -> None:
    often = estimate_run(trillion(), assumed(("failures_per_1000_node_days=13",), EXACT))
    seldom = estimate_run(trillion(), assumed(("failures_per_1000_node_days=1.3",), EXACT))
    per_day = [run.failures / run.days for run in (often, seldom)]
    assert per_day[0] == pytest.approx(10 * per_day[1])


def test_a_run_file_may_exclude_saves_by_an_interval_that_never_comes() -> None:
    spec = RunSpec(
        checkpoint=CheckpointSpec(every_steps=10**9), fleet=FleetSpec(nodes=2, snapshot_every_steps=10**9)
    )
    assumptions = assumed((), EXACT, spec, step_s=40.0, steps=10**6)
    assert assumptions.durable_interval_s == assumptions.checkpoint_interval_s == MOST_SECONDS
    assert assumed(("recovery=restart",), EXACT, spec, 40.0, 10**6).checkpoint_interval_s == MOST_SECONDS


def test_an_assumption_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RunEstimateError, match="recovery is given twice, before as 'spare'"):
        assumed(("recovery=spare", "recovery=restart"), EXACT)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("recovery=hope", "spare or shrink or restart"),
        ("repair=3", "did you mean repair_s"),
        ("repair_s=soon", "float"),
        ("repair_s", "write a value, as in repair_s="),
        ("repair_s=-1", "must not be negative"),
        ("failure_classes=3", "is not an assumption"),
        ("failures_per_1000_node_days=0", "must be positive"),
        ("failures_per_1000_node_days=inf", "must be positive and finite"),
        ("failures_per_1000_node_days=nan", "must be positive and finite"),
        ("repair_s=1e30", "is in seconds: 1e\\+30 are more than ten years"),
        ("planned_pauses_per_day=inf", "must be finite"),
        ("usd_per_kwh=inf", "must be finite"),
        ("pue=0.5", "pue must be 1 or more"),
        ("spare_nodes=10000000", "at most 1,000,000"),
    ],
)
def test_an_assumption_that_cannot_be_is_refused_with_its_name_and_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(RunEstimateError, match=re.escape(text) + ".*" + remedy):
        assumed((text,), EXACT)

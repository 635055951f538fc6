"""The renewal formula against brute force, its limits, a step-by-step simulation, and published runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.save.save_schedule import daly_interval_s, optimal_interval_s, young_interval_s
from phalanx_plan.whole_run.goodput import (
    CheckpointPlan,
    GoodputError,
    RecoveryPhase,
    Risk,
    breakdown,
    efficiency,
    interval_s,
    nested_breakdown,
    simulate,
)

minutes = 60.0
days = 86_400.0


def risk(mtti_s: float, stall_s: float, recovery_s: float) -> Risk:
    return Risk(
        mtti_s,
        stall_s,
        (RecoveryPhase("fault.undetected", recovery_s / 4), RecoveryPhase("reconfigure", recovery_s * 3 / 4)),
    )


NEVER = risk(math.inf, 0.0, 0.0)
mttis = st.floats(100.0, 1e7)
stalls = st.floats(1e-3, 1e3)
recoveries = st.floats(0.0, 3600.0)


@given(mttis, stalls, recoveries)
def test_no_other_interval_is_better_than_the_optimum(
    mtti_s: float, stall_s: float, recovery_s: float
) -> None:
    node_risk = risk(mtti_s, stall_s, recovery_s)
    best_s = optimal_interval_s(mtti_s, stall_s)
    best = efficiency(node_risk, best_s)
    others = [efficiency(node_risk, best_s * factor) for factor in (0.3, 0.9, 0.99, 1.01, 1.1, 3.0)]
    assert all(other <= best * (1 + 1e-12) for other in others)


@given(mttis, st.floats(1e-3, 1e-2))
def test_young_and_daly_approach_the_optimum_as_the_stall_shrinks(mtti_s: float, share: float) -> None:
    stall_s = share * mtti_s
    best_s = optimal_interval_s(mtti_s, stall_s)
    assert daly_interval_s(mtti_s, stall_s) == pytest.approx(best_s, rel=1e-3)
    assert young_interval_s(mtti_s, stall_s) == pytest.approx(best_s, rel=0.1)


def test_the_optimum_never_exceeds_the_time_between_failures() -> None:
    assert optimal_interval_s(100.0, 1e6) == pytest.approx(100.0)
    assert daly_interval_s(100.0, 1e6) == 100.0


def test_without_failures_only_the_stalls_cost_anything() -> None:
    node_risk = risk(math.inf, 1.0, 600.0)
    assert efficiency(node_risk, 9.0) == pytest.approx(0.9)
    assert efficiency(risk(1e12, 1.0, 600.0), 9.0) == pytest.approx(0.9)


@given(mttis, stalls, recoveries, st.floats(1.0, 1e5))
def test_the_breakdown_sums_to_one_and_names_the_goodput(
    mtti_s: float, stall_s: float, recovery_s: float, interval: float
) -> None:
    node_risk = risk(mtti_s, stall_s, recovery_s)
    shares = breakdown(node_risk, interval)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    assert shares["committed"] == efficiency(node_risk, interval)


@given(mttis, stalls, recoveries, st.floats(100.0, 1e6))
def test_the_nested_breakdown_sums_to_one_and_names_the_nested_goodput(
    mtti_s: float, stall_s: float, recovery_s: float, durable_s: float
) -> None:
    plan = CheckpointPlan(risk(mtti_s, stall_s, recovery_s), 50.0, risk(100 * mtti_s, 2.0, 1200.0), durable_s)
    shares = plan.breakdown
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["committed"] == pytest.approx(plan.goodput)


@given(mttis, stalls, recoveries, st.floats(1.0, 2.0))
def test_fewer_failures_shorter_stalls_and_quicker_recovery_never_lose(
    mtti_s: float, stall_s: float, recovery_s: float, better: float
) -> None:
    def best(node_risk: Risk) -> float:
        return efficiency(node_risk, optimal_interval_s(node_risk.mtti_s, node_risk.stall_s))

    now = best(risk(mtti_s, stall_s, recovery_s)) * (1 - 1e-12)
    assert best(risk(mtti_s * better, stall_s, recovery_s)) >= now
    assert best(risk(mtti_s, stall_s / better, recovery_s)) >= now
    assert best(risk(mtti_s, stall_s, recovery_s / better)) >= now


@given(st.floats(1e-2, 1e5), st.floats(0.01, 100.0), st.floats(0.0, 1e4))
def test_the_interval_is_whole_steps_and_leaves_the_last_save_time_to_drain(
    stall_s: float, step_s: float, drain_s: float
) -> None:
    chosen_s = interval_s(risk(1e4, stall_s, 60.0), drain_s, step_s)
    assert chosen_s / step_s == pytest.approx(round(chosen_s / step_s))
    assert chosen_s >= max(step_s, drain_s) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("gpus", "stall_s", "recovery_s", "goodput"),
    [
        (16_384, 60, 1200, 0.808),
        (100_000, 60, 1200, 0.396),
        (100_000, 5, 600, 0.668),
        (100_000, 1, 60, 0.936),
        (250_000, 1, 60, 0.874),
    ],
)
def test_a_table_of_fleets_at_llama_3_s_failure_rate_is_reproduced(
    gpus: int, stall_s: float, recovery_s: float, goodput: float
) -> None:
    """Numbers of an independent implementation of Daly's formula."""
    mtti_s = 54 * days * 16_384 / 419 / gpus
    best_s = optimal_interval_s(mtti_s, stall_s)
    assert efficiency(risk(mtti_s, stall_s, recovery_s), best_s) == pytest.approx(goodput, abs=0.001)


@pytest.mark.parametrize(("stall", "reported"), [(10 * minutes, 0.44), (3 * minutes, 0.80)])
def test_what_meta_reports_at_100k_gpus_is_what_recoveries_leave_less_some_work_done_again(
    stall: float, reported: float
) -> None:
    """FT-HSDP (arXiv:2602.00277): a failure every 18 minutes (as summarized by others), stalls of 10 and of 3
    minutes.

    Recoveries alone leave e^(-10/18) = 57 % and e^(-3/18) = 85 %; (18 - 10) / 18 = 44 % has no lost work in
    it, and no failure during a recovery.
    """
    shares = breakdown(risk(18 * minutes, 0.0, stall), 1e-6)
    recoveries = shares["fault.undetected"] + shares["reconfigure"]
    assert recoveries == pytest.approx(1 - math.exp(-stall / (18 * minutes)))
    assert reported < 1 - recoveries < reported + 0.14


# --- simulation ---------------------------------------------------------------------------------


def simulated_goodput(plan: CheckpointPlan, work_s: float, runs: int = 400, seed: int = 0) -> float:
    wall_s = simulate(plan, np.full(runs, work_s), np.ones(runs), seed)
    return work_s * runs / float(wall_s.sum())


@pytest.mark.parametrize(
    ("mtti_s", "stall_s", "recovery_s"), [(1800.0, 5.0, 600.0), (1800.0, 60.0, 1200.0), (11_000.0, 1.0, 60.0)]
)
def test_simulated_runs_agree_with_the_closed_form(mtti_s: float, stall_s: float, recovery_s: float) -> None:
    node_risk = risk(mtti_s, stall_s, recovery_s)
    plan = CheckpointPlan(node_risk, optimal_interval_s(mtti_s, stall_s), NEVER, 1e9)
    assert simulated_goodput(plan, 30 * days) == pytest.approx(plan.goodput, rel=0.01)


@pytest.mark.parametrize("rare_mtti_s", [30_000.0, 200_000.0])
def test_simulated_runs_with_a_rare_risk_agree_with_the_nested_closed_form(rare_mtti_s: float) -> None:
    frequent, rare = risk(1800.0, 0.5, 60.0), risk(rare_mtti_s, 0.0, 600.0)
    plan = CheckpointPlan(frequent, 45.0, rare, 1800.0)
    assert simulated_goodput(plan, 60 * days) == pytest.approx(plan.goodput, rel=0.01)


def test_a_naive_simulation_second_by_second_agrees_with_the_closed_form() -> None:
    """One long run, tick by tick: no formula for what an interval is."""
    random = np.random.default_rng(1)
    mtti, interval, stall, recovery, ticks = 200, 20, 2, 30, 400_000
    fails = random.random(ticks) < -math.expm1(-1 / mtti)
    kept = pending = 0
    left_of_recovery = position = 0
    for failed in fails:
        if failed:
            pending, position, left_of_recovery = 0, 0, recovery
        elif left_of_recovery:
            left_of_recovery -= 1
        else:
            pending += position < interval
            position += 1
            if position == interval + stall:
                kept, pending, position = kept + pending, 0, 0
    assert kept / ticks == pytest.approx(efficiency(risk(mtti, stall, recovery), interval), rel=0.02)


def test_a_rare_recovery_that_frequent_failures_interrupt_agrees_with_simulation() -> None:
    plan = CheckpointPlan(risk(1800.0, 0.5, 60.0), 45.0, risk(60_000.0, 0.0, 2400.0), 1800.0)
    assert simulated_goodput(plan, 60 * days) == pytest.approx(plan.goodput, rel=0.01)


def test_runs_simulated_in_part_scatter_as_those_simulated_in_full() -> None:
    plan = CheckpointPlan(risk(600.0, 0.5, 60.0), 30.0, risk(60_000.0, 0.0, 600.0), 1800.0)
    work, factor = np.full(1500, 20 * days), np.ones(1500)
    full_s = simulate(plan, work, factor, 0, most_failures=math.inf)
    part_s = simulate(plan, work, factor, 1, most_failures=500)
    assert part_s.mean() == pytest.approx(full_s.mean(), rel=0.002)
    assert part_s.std() == pytest.approx(full_s.std(), rel=0.1)


def test_the_same_seed_gives_the_same_runs_and_another_seed_others() -> None:
    plan = CheckpointPlan(risk(1800.0, 5.0, 600.0), 100.0, risk(1e6, 0.0, 600.0), 1800.0)
    work, factor = np.full(20, 5 * days), np.ones(20)
    assert np.array_equal(simulate(plan, work, factor, 3), simulate(plan, work, factor, 3))
    assert not np.array_equal(simulate(plan, work, factor, 3), simulate(plan, work, factor, 4))


def test_without_failures_every_simulated_run_takes_its_work_and_its_stalls() -> None:
    plan = CheckpointPlan(Risk(math.inf, 1.0, ()), 9.0, NEVER, 1e9)
    # 10 intervals of 9 s, and no checkpoint after the last.
    assert simulate(plan, np.full(3, 90.0), np.ones(3), 0) == pytest.approx(99.0)


def test_a_fleet_that_fails_faster_than_it_recovers_never_finishes() -> None:
    plan = CheckpointPlan(risk(60.0, 5.0, 600.0), 20.0, NEVER, 1e9)
    assert np.isinf(simulate(plan, np.full(3, days), np.ones(3), 0)).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.floats(1.0, 3.0))
def test_no_simulated_run_is_quicker_than_its_work(seed: int, factor: float) -> None:
    plan = CheckpointPlan(risk(1800.0, 5.0, 100.0), 100.0, risk(1e5, 0.0, 600.0), 1800.0)
    wall_s = simulate(plan, np.full(10, days), np.full(10, factor), seed)
    assert (wall_s >= days).all()


def test_impossible_times_are_refused_by_name() -> None:
    with pytest.raises(GoodputError, match="mtti_s"):
        Risk(0.0, 1.0, ())
    with pytest.raises(GoodputError, match="stall_s"):
        Risk(1.0, -1.0, ())
    with pytest.raises(GoodputError, match="interval"):
        efficiency(risk(100.0, 1.0, 1.0), 0.0)
    with pytest.raises(GoodputError, match="interval"):
        efficiency(risk(math.inf, 0.0, 1.0), 0.0)


def test_a_rare_risk_that_never_strikes_changes_nothing() -> None:
    node_risk = risk(1800.0, 5.0, 600.0)
    assert nested_breakdown(node_risk, 100.0, NEVER, 1e9) == breakdown(node_risk, 100.0)

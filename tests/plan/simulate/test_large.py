"""Large fleets: the time adds up, and follows from the rates and durations that were put in."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.simulated_clock import Account, SimulatedClock
from phalanx_plan.cli.simulate_command import command
from phalanx_plan.simulate.large import Scenario, simulate

SMALL = Scenario(nodes=300, spares=12, days=40.0, seed=1)


def test_every_second_is_in_one_bucket_and_every_node_second_too() -> None:
    report = simulate(SMALL)
    assert sum(report.buckets_s.values()) == pytest.approx(report.elapsed_s, rel=1e-12)
    assert sum(report.node_s.values()) == pytest.approx(312 * report.elapsed_s, rel=1e-12)
    assert report.buckets_s["useful steps"] == report.steps * SMALL.step_s


def test_failures_come_at_the_requested_rate() -> None:
    expected = 3.79 / 1000 * 312 * 40
    assert sum(simulate(SMALL).failures.values()) == pytest.approx(expected, abs=4 * expected**0.5)


def test_a_simulation_is_a_function_of_its_scenario() -> None:
    assert simulate(SMALL) == simulate(SMALL) != simulate(dataclasses.replace(SMALL, seed=2))


def test_twice_the_failures_cost_about_twice_the_time() -> None:
    lost = [1 - simulate(dataclasses.replace(SMALL, rate=rate, days=80.0)).goodput for rate in (5.0, 10.0)]
    assert 1.3 < lost[1] / lost[0] < 3.0


def test_without_spares_the_fleet_shrinks_and_grows() -> None:
    report = simulate(dataclasses.replace(SMALL, spares=0))
    assert report.regroups > 0
    assert report.goodput > 0.99


def test_time_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        Account().split({"useful steps": 3}, "parking", 4)


def test_what_happens_at_one_time_happens_in_the_order_of_its_making() -> None:
    clock, seen = SimulatedClock(), list[int]()
    for number in range(3):
        clock.at(1.0, lambda number=number: seen.append(number))
    clock.run_until(2.0)
    assert seen == [0, 1, 2]
    assert clock.now_s == 2.0


def test_the_command_prints_what_was_simulated() -> None:
    result = CliRunner().invoke(command, ["fleet", "--nodes", "50", "--days", "10", "--seed", "7", "--json"])
    assert json.loads(result.output)["scenario"]["spares"] == 0
    assert result.exit_code == 0
    result = CliRunner().invoke(command, ["fleet", "--nodes", "50", "--days", "10"])
    assert "goodput" in result.output


def test_the_command_runs_small_worlds() -> None:
    result = CliRunner().invoke(command, ["fleet", "--small", "--seeds", "0:2", "--json"])
    assert json.loads(result.output)["worlds"] == 2
    result = CliRunner().invoke(command, ["fleet", "--small", "--seeds", "2:0"])
    assert result.exit_code == 2
    assert "FIRST:END" in result.output


def test_reports_of_progress_change_nothing_of_a_simulation() -> None:
    reports: list[tuple[float, float]] = []
    scenario = Scenario(20, 1, days=3.0, rate=200.0)
    assert simulate(scenario, lambda done, days: reports.append((done, days))) == simulate(scenario)
    assert reports == sorted(reports)
    assert reports[-1] == (3.0, 3.0)


def test_the_command_in_the_message_of_a_broken_invariant_simulates_the_same_scenario(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise BrokenInvariant("a planted defect")

    scenario = Scenario(20, 4, 3.1234567, 5, 200.12345, 7.5, unit=2, spares_together=2)
    with monkeypatch.context() as patch:
        patch.setattr("phalanx_plan.simulate.large.check", broken)
        with pytest.raises(BrokenInvariant) as caught:
            simulate(scenario)
    _, _, again = str(caught.value).partition("phalanx simulate ")
    result = CliRunner().invoke(command, [*again.split(), "--json"])
    assert json.loads(result.output)["scenario"] == dataclasses.asdict(scenario)


def test_progress_is_reported_from_the_first_node_that_joins() -> None:
    progress: list[tuple[float, float]] = []
    simulate(SMALL, lambda *days: progress.append(days))
    joined = [days for days, _ in progress if days == 0.0]
    assert len(joined) == SMALL.nodes + SMALL.spares
    assert progress[-1] == (SMALL.days, SMALL.days)

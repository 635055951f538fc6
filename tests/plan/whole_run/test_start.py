"""The closed forms of a start: what grows with the nodes, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.cluster import Fact
from phalanx_plan.whole_run.recovery import MEASURED, Start, StartError, read_s, start

NODES = st.integers(1, 25_000)


def seconds(start_phases: Start) -> dict[str, float]:
    return {phase.name: phase.duration_s for phase in start_phases.phases}


@given(NODES)
def test_twice_the_nodes_take_twice_as_long_in_one_place_four_times_where_all_are_looked_at_and_no_longer_by_themselves(
    nodes: int,
) -> None:
    single, double = seconds(start(nodes)), seconds(start(2 * nodes))
    assert double["agents import"] == single["agents import"]
    assert double["workers import"] == single["workers import"]
    assert 2 <= double["epoch is formed"] / single["epoch is formed"] <= 4
    assert double["ranks meet"] == pytest.approx(2 * single["ranks meet"])
    assert 2 <= double["agents attach"] / single["agents attach"] <= 4
    linear = replace(MEASURED, attach_s_per_node=Fact(0.0, "as if no agent looked at the others"))
    ones, twos = (seconds(start(count, costs=linear))["agents attach"] for count in (nodes, 2 * nodes))
    assert twos == pytest.approx(2 * ones)


@given(NODES, st.floats(0, 1e4))
def test_a_start_takes_the_sum_of_its_phases_but_for_the_one_that_another_hides(
    nodes: int, restore_s: float
) -> None:
    started = start(nodes, restore_s=restore_s)
    each = seconds(started)
    hidden = min(each["agents attach"], each["workers import"])
    assert started.total_s == pytest.approx(sum(each.values()) - hidden)


@given(NODES)
def test_files_on_every_node_are_never_slower_than_those_of_a_shared_file_system(nodes: int) -> None:
    assert start(nodes).total_s <= start(nodes, files="shared").total_s


def test_a_launcher_that_logs_into_every_node_does_so_by_rounds() -> None:
    each = MEASURED
    at_once = each.hosts_at_once
    one_round, two_rounds = (seconds(start(count, by_ssh=True))["launch"] for count in (at_once, at_once + 1))
    assert two_rounds == pytest.approx(2 * one_round)
    assert seconds(start(at_once))["launch"] == 0


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 1, "workers": 0}, {"nodes": 1, "restore_s": -1.0}])
def test_a_start_without_nodes_or_before_its_launch_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(StartError):
        start(**wrong)  # type: ignore[arg-type]


def test_a_checkpoint_is_read_at_the_rate_of_its_storage_or_of_the_nodes_if_they_are_few() -> None:
    assert read_s(1e12, 1, 100e9, 10e9) == 100.0
    assert read_s(1e12, 1000, 100e9, 10e9) == 10.0
    with pytest.raises(StartError, match="rate"):
        read_s(1e12, 1, 0.0, 10e9)

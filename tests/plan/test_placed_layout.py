"""Layouts and their placement are chosen together: the planner's ranking on networks that are thick, thin, or too small."""

from __future__ import annotations

from functools import cache

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.launch.placing import Level, Topology, TopologyError
from phalanx_plan.planner import placer_on
from phalanx_plan.search.plan import Plan, make_plan
from phalanx_plan.search.query import Aim, run_of_model
from phalanx_plan.step_cost.estimate import estimate

SPEC = run_of_model("llama3-8b", 4096, 64)
PODS = Topology((Level("pod"),), {f"n{number}": (f"pod-{number // 4}",) for number in range(8)})


@cache
def plan_on(share: float, layout: str | None = None) -> Plan:
    placer = placer_on(PODS.with_rates(0.0, {"pod": share}), SPEC)
    aim = Aim(top=20, layout=layout)
    return make_plan(SPEC, cluster("h100:64"), aim, stated=(), searching=layout is None, placer=placer)


def test_the_best_layout_of_a_thick_network_loses_to_another_on_a_thin_one() -> None:
    thick, thin = plan_on(1.0), plan_on(0.05)
    assert thick.chosen.layout.pipeline == 1
    assert thin.chosen.layout.pipeline == 2
    # Each is the better one where it was chosen: nothing but the network's share differs.
    assert thick.chosen.step_s < plan_on(1.0, str(thin.chosen.layout)).chosen.step_s
    assert thin.chosen.step_s < plan_on(0.05, str(thick.chosen.layout)).chosen.step_s


@pytest.mark.parametrize("share", [1.0, 0.05, 0.01])
def test_a_step_is_that_of_a_near_network_and_what_the_placement_adds(share: float) -> None:
    plan = plan_on(share)
    assert plan.placements is not None
    for estimated in plan.best:
        near = estimate(plan.job, estimated.layout)
        added_s = plan.placements[estimated.layout].added_s
        assert estimated.step_s == pytest.approx(near.step_s + added_s)
        assert estimated.step_s / estimated.closed_form_s - 1 == pytest.approx(
            (near.step_s - near.closed_form_s) / estimated.closed_form_s, abs=1e-9
        )


def test_layouts_are_ranked_with_their_placement_but_for_one_with_room_that_goes_first() -> None:
    steps = [estimated.step_s for estimated in plan_on(0.01).best]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= 1.03 * min(steps)
    assert max(estimated.added_s for estimated in (plan_on(0.01).placements or {}).values()) > 0


def test_where_no_uplink_is_slower_than_the_nodes_the_ranking_is_that_without_a_network() -> None:
    without = make_plan(SPEC, cluster("h100:64"), Aim(top=20), stated=())
    assert plan_on(1.0).chosen.layout == without.chosen.layout
    assert plan_on(1.0).chosen.step_s == without.chosen.step_s


def test_the_best_of_every_family_that_lost_is_listed_with_the_network() -> None:
    result = plan_on(0.05).search_result
    assert result is not None
    losers = {loser.family: loser for loser in result.runners_up}
    assert losers["pipeline=1"].slower > 0
    assert any("uplinks" in loser.reason for loser in losers.values())
    assert "pipeline=2" not in losers


def test_a_network_with_too_few_nodes_is_refused_with_what_is_needed_and_there() -> None:
    few = Topology(PODS.levels, PODS.nodes, taken=frozenset(["n0"]), source="fabric.toml")
    with pytest.raises(
        TopologyError,
        match=r"64 accelerators .* are 8 nodes of 8, and 7 of the 8 nodes of fabric.toml are free",
    ):
        make_plan(SPEC, cluster("h100:64"), Aim(), stated=(), placer=placer_on(few, SPEC))


def test_a_search_for_few_accelerators_takes_layouts_that_the_free_nodes_hold() -> None:
    few = Topology(PODS.levels, PODS.nodes, taken=frozenset(["n0"]))
    aim = Aim(optimize="cost")
    plan = make_plan(SPEC, cluster("h100:64"), aim, stated=(), placer=placer_on(few, SPEC))
    assert all(estimated.ranks <= 56 for estimated in plan.best)

"""The choice of spares in a simulated fleet: units torn are counted right, and the nearest spare tears fewer than any."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from phalanx_plan.cli.simulate_command import command
from phalanx_plan.simulate.large import Scenario, simulate
from phalanx_plan.simulate.spares import NetworkUse, SpareStudy

DOMAINS = {name: (name[0], name[:2]) for name in ("a1x", "a1y", "a1z", "a2x", "b1x", "b1y")}
SPREAD = Scenario(nodes=640, spares=64, days=40.0, seed=3, unit=4, spares_together=4, hall_nodes=176)


def test_units_are_torn_from_the_moment_a_far_node_takes_a_seat_until_it_leaves_again() -> None:
    study = SpareStudy(
        DOMAINS,
        unit=2,
        seed=0,
        step_cost=lambda seats: NetworkUse(float("b1y" in seats), (8.0, 4.0 * ("a2x" in seats))),
    )
    study.record_seats(0.0, ["a1x", "a1y", "b1x", "b1y"], {"a1z", "a2x"})
    study.record_seats(10.0, ["a1x", "a2x", "b1x", "b1y"], {"a1z"})
    study.record_seats(30.0, ["a1x", "a2x", "b1x", "a1z"], set())
    kept = study.results(40.0)["nearest spare"]
    # One unit leaves its rack for 30 s of 40; the other one leaves rack and hall for 10 s.
    assert kept.torn_units == (0.25, 1.0)
    assert kept.most_torn_units == (1, 2)
    assert (kept.replaced, kept.replaced_near) == (2, (0.5, 0.0))
    assert kept.network.step_s == pytest.approx(0.75)
    assert kept.network.left_bytes == pytest.approx((8.0, 3.0))


def test_a_fleet_that_takes_any_spare_has_the_same_nodes_to_take() -> None:
    study = SpareStudy(DOMAINS, unit=2, seed=0)
    study.record_seats(0.0, ["a1x", "a1y", "b1x", "b1y"], {"a1z", "a2x"})
    study.record_seats(10.0, ["a1x", "a1z", "b1x", "b1y"], {"a2x"})
    assert study.drawn.seats[0] == "a1x"
    assert study.drawn.seats[1] in {"a1z", "a2x"}
    assert len(set(study.drawn.seats)) == 4


def test_the_nearest_spares_tear_fewer_units_than_any_and_spread_ones_fewer_still() -> None:
    spread = simulate(SPREAD).units_kept
    block = simulate(Scenario(**{**vars(SPREAD), "spares_together": 0})).units_kept
    for kept in (spread, block):
        assert kept["nearest spare"].replaced > 20
        assert kept["nearest spare"].torn_units[0] < kept["any spare"].torn_units[0]
    assert spread["nearest spare"].torn_units[0] < block["nearest spare"].torn_units[0]
    assert spread["nearest spare"].replaced_near[0] > 0.8


def test_spares_that_are_spread_have_the_requested_number_and_groups() -> None:
    spares = list(SPREAD.spread_spares())
    assert len(set(spares)) == 64
    assert all(
        first % 4 == 0 and spares[place : place + 4] == list(range(first, first + 4))
        for place, first in [*enumerate(spares)][::4]
    )


def test_following_units_changes_nothing_of_what_happens() -> None:
    plain, followed = (simulate(Scenario(300, 12, days=20.0, seed=1, unit=unit)) for unit in (1, 2))
    assert plain.failures == followed.failures
    assert plain.units_kept == {}


def test_the_command_prints_how_well_units_were_kept() -> None:
    arguments = [
        "fleet",
        "--nodes",
        "320",
        "--spares",
        "32",
        "--days",
        "10",
        "--unit",
        "4",
        "--spares-together",
        "4",
    ]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0
    assert "nearest spare  units that leave, on average: 0.0 their hall" in result.output
    refused = CliRunner().invoke(command, ["fleet", "--nodes", "50", "--unit", "4"])
    assert refused.exit_code == 2
    assert "50 nodes are not whole units of 4" in refused.output

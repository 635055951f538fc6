"""Seats: members are near each other in the network, also after the fleet has become smaller or larger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, fleet_in_racks, settings
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.seating import common_levels
from phalanx.fleet.core.settings import Formation
from phalanx.launch.placing import Order


def test_domains_agree_from_the_widest_level_on() -> None:
    assert common_levels(("hall", "switch", "rack"), ("hall", "switch", "other")) == 2
    assert common_levels(("hall", "switch"), ("other", "switch")) == 0
    assert common_levels(("hall",), ("hall", "switch")) == 1


def test_the_nearest_spare_takes_the_place_of_a_lost_node() -> None:
    fleet = fleet_in_racks("r0", "r1", "r2", "r0")
    fleet.handle(m.Disconnected("0", 1), m.Broken("1", 1, 0, 0))
    fleet.park()
    assert fleet.state.seats == ["3", "1"]


def test_a_rack_that_lost_several_nodes_at_once_gives_no_spare_while_others_can() -> None:
    fleet = fleet_in_racks("r0", "r0", "r1", "r0", "r0", "r2", "r2", seats=3)
    fleet.handle(m.Disconnected("0", 1), m.Disconnected("1", 1), m.Broken("2", 1, 0, 0))
    fleet.park()
    assert set(fleet.state.seats) == {"5", "6", "2"}


def test_the_spare_that_is_near_the_rest_of_its_block_is_taken() -> None:
    fleet = fleet_in_racks("r0", "r0", "r1", "r1", "r0", "r1", seats=4, block=2, unit=2)
    fleet.handle(m.Disconnected("3", 1), m.Broken("2", 1, 0, 0))
    fleet.park()
    assert fleet.state.seats == ["0", "1", "2", "5"]


def test_the_first_formation_keeps_units_below_one_switch() -> None:
    # By name the second unit would lie in two racks.
    fleet = fleet_in_racks("a", "a", "a", "b", "b", seats=4, unit=2, block=2, expected_nodes=5)
    racks = [fleet.state.nodes[name].domain for name in fleet.state.seats]
    assert racks[0] == racks[1]
    assert racks[2] == racks[3]
    assert fleet.state.spares == {"2"}


def test_the_first_formation_waits_for_spares_only_where_nodes_report_their_domain() -> None:
    for domain, formed in (((), True), (("hall", "rack"), False)):
        fleet = Fleet(settings(2, expected_nodes=3, gather_s=5.0))
        for name in ("0", "1"):
            fleet.handle(m.Joined(name, 1, 1, name, 7, domain, meeting_points=(f"{name}:1",)))
        assert bool(fleet.state.seats) == formed
        fleet.handle(m.Tick(), after_s=fleet.state.settings.gather_s)
        assert fleet.state.seats


def test_stages_of_a_replica_are_neighbors_if_that_is_the_order() -> None:
    formation = Formation(1, (4,), pipeline=2)
    fleet = fleet_in_racks("a", "a", "b", "b", seats=4, formation=formation, order="pipeline")
    racks = [fleet.state.nodes[name].domain[1] for name in fleet.state.seats]
    assert racks == ["a", "b", "a", "b"]


def racks_of(fleet: Fleet) -> list[str]:
    """The rack of each seat."""
    return [fleet.state.nodes[name].domain[-1] for name in fleet.state.seats]


def lose(fleet: Fleet, *names: str) -> None:
    """These nodes are gone; the others leave the epoch, and the next one is formed."""
    other = next(name for name in fleet.state.seats if name not in names)
    fleet.handle(*(m.Disconnected(name, 1) for name in names), m.Broken(other, 1, fleet.state.epoch, 0))
    fleet.handle(m.Tick(), after_s=fleet.state.settings.confirm_s)
    fleet.park()
    fleet.bind()


def pipeline_of_two(seats: int, order: Order = "data", unit: int = 1) -> dict[str, Any]:
    """Settings of a run with two stages, one worker a node."""
    return {
        "seats": seats,
        "formation": Formation(1, tuple(range(2, seats + 1, 2)), pipeline=2),
        "order": order,
        "unit": unit,
    }


def test_a_pipeline_that_loses_a_replica_is_laid_anew_so_that_each_stage_stays_in_its_rack() -> None:
    # With the seats that they had, stage 0 would be a, a, b and stage 1 a node of a that took the lost one's place, b, b.
    fleet = fleet_in_racks(*"aaaabbbb", **pipeline_of_two(8))
    assert racks_of(fleet) == [*"aaaabbbb"]
    lose(fleet, "0", "4")
    assert racks_of(fleet) == [*"aaabbb"]
    assert fleet.state.seats == ["1", "2", "3", "5", "6", "7"]


def test_a_pipeline_that_grows_back_has_its_stages_where_they_were() -> None:
    fleet = fleet_in_racks(*"aaaabbbb", **pipeline_of_two(8), grow_s=1.0)
    lose(fleet, "1", "6")
    for name, rack in (("1", "a"), ("6", "b")):
        fleet.handle(m.Joined(name, 2, 1, name, 7, ("hall", rack), meeting_points=(f"{name}:2",)))
    fleet.handle(m.Tick(), after_s=2.0)
    fleet.park()
    assert racks_of(fleet) == [*"aaaabbbb"]


def test_replicas_stay_together_where_that_is_the_order() -> None:
    fleet = fleet_in_racks(*"aabbcc", **pipeline_of_two(6, "pipeline", unit=2))
    assert racks_of(fleet) == [*"abcabc"]
    lose(fleet, "2", "3")
    assert racks_of(fleet) == [*"acac"]


def test_a_node_keeps_its_stage_where_its_rack_has_seats_of_it() -> None:
    # Replica by replica in one rack, the loss of node 0 would move every node to the other stage.
    fleet = fleet_in_racks(*"aaaaaa", **pipeline_of_two(6, "pipeline"))
    before = {name: seat // 3 for seat, name in enumerate(fleet.state.seats)}
    lose(fleet, "0", "3")
    assert all(before[name] == seat // 2 for seat, name in enumerate(fleet.state.seats))


def test_replicas_that_hold_the_same_keep_it_when_one_of_them_is_lost() -> None:
    # Two ranks share one copy of the state: node 2 has the first half, and so has the seat that it keeps.
    formation = Formation(1, (2, 4, 6), shard_ranks=2)
    fleet = fleet_in_racks(*"aaaaaa", seats=6, formation=formation)
    lose(fleet, "1", "4")
    assert all(int(name) % 2 == seat % 2 for seat, name in enumerate(fleet.state.seats))


def test_nodes_that_report_no_domain_keep_their_seats() -> None:
    fleet = Fleet(settings(6, formation=Formation(1, (2, 4, 6), pipeline=2)))
    for name in "012345":
        fleet.handle(m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",)))
    fleet.bind()
    lose(fleet, "0", "4")
    assert fleet.state.seats[1:] == ["1", "2", "3"]


def whole(domains: Sequence[tuple[str, ...]], unit: int, depth: int) -> int:
    """Units that lie in one domain of this level."""
    units = [domains[first : first + unit] for first in range(0, len(domains), unit)]
    return sum(len({domain[:depth] for domain in group}) == 1 for group in units)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("123")), min_size=6, max_size=12),
    st.sampled_from((1, 2)),
    st.data(),
)
def test_after_any_loss_as_many_units_are_whole_as_the_seated_nodes_allow(
    racks: list[tuple[str, str]], pipeline: int, data: st.DataObject
) -> None:
    unit, count = 2, len(racks) // 4 * 4
    formation = Formation(1, tuple(range(4, count + 1, 4)), pipeline=pipeline)
    fleet = Fleet(settings(count, formation=formation, unit=unit, gather_s=0.0))
    for number, domain in enumerate(racks):
        name = str(number)
        fleet.handle(m.Joined(name, 1, 1, name, 7, domain, meeting_points=(f"{name}:1",)))
    fleet.handle(m.Tick(), after_s=20.0)
    fleet.bind()
    lost = data.draw(
        st.lists(st.sampled_from(fleet.state.seats), min_size=1, max_size=len(racks) - 4, unique=True)
    )
    lose(fleet, *lost)
    state = fleet.state
    if len(state.seats) == count:
        return
    domains = [state.nodes[name].domain for name in state.seats]
    for depth in (1, 2):
        most = sum(n // unit for n in Counter(domain[:depth] for domain in domains).values())
        assert whole(domains, unit, depth) == most
    assert domains[::unit] == sorted(domains[::unit])


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("123")), min_size=5, max_size=10),
    st.sampled_from((1, 2)),
    st.data(),
)
def test_a_fleet_that_grows_keeps_its_members_unless_units_would_be_torn(
    racks: list[tuple[str, str]], unit: int, data: st.DataObject
) -> None:
    formation = Formation(1, (2, 4))
    fleet = Fleet(settings(2, formation=formation, unit=unit, expected_nodes=2))

    def join(number: int) -> None:
        name = str(number)
        fleet.handle(m.Joined(name, 1, 1, name, 7, racks[number], meeting_points=(f"{name}:1",)))

    first = data.draw(st.permutations(range(len(racks))))
    for number in first[:2]:
        join(number)
    fleet.bind()
    members = set(fleet.state.seats)
    fleet.handle(m.Enlarge(4, len(racks), (2, 4)))
    for number in first[2:]:
        join(number)
    fleet.handle(m.Tick(), after_s=31.0)
    fleet.park()
    state = fleet.state
    seated = set(state.seats)
    assert len(seated) == 4
    dropped, taken = members - seated, seated - members
    assert not dropped or unit == 2
    # A node that is dropped makes room for a unit elsewhere, never for a spare of the same rack.
    assert not {state.nodes[name].domain for name in dropped} & {state.nodes[name].domain for name in taken}


@pytest.mark.parametrize(
    ("members", "joining"),
    [
        # With both spares of rack b1 one unit is whole, and the members are the other one, in hall a.
        (["a2", "a3"], ["b1", "b1", "a1"]),
        # Each member's rack has a spare, which makes a unit with it; the nearest two by name are of one rack.
        (["a1", "a2"], ["a1", "a1", "a1", "a2"]),
    ],
)
def test_no_member_goes_where_other_spares_leave_as_few_units_torn(
    members: list[str], joining: list[str]
) -> None:
    fleet = Fleet(settings(2, formation=Formation(1, (2, 4)), unit=2, expected_nodes=2))
    for number, where in enumerate([*members, *joining]):
        if number == len(members):
            fleet.bind()
            fleet.handle(m.Enlarge(4, 8, (2, 4)))
        name = str(number)
        fleet.handle(m.Joined(name, 1, 1, name, 7, (where[0], where), meeting_points=(f"{name}:1",)))
    fleet.handle(m.Tick(), after_s=31.0)
    fleet.park()
    assert len(fleet.state.seats) == 4
    assert {"0", "1"} <= set(fleet.state.seats)

"""PlacedUnits against an exhaustive search: as many whole units at every level as there can be, and spares where they are near."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.placing import (
    Level,
    PlacedUnits,
    Topology,
    TopologyError,
    from_domains,
    most_units,
    place_units,
)

POD, LEAF = Level("pod"), Level("leaf")


def tree(*pods: list[int]) -> Topology:
    """Pods of leaves with so many free nodes each."""
    nodes = {
        f"p{pod}l{leaf}n{number}": (f"p{pod}", f"l{leaf}")
        for pod, leaves in enumerate(pods)
        for leaf, count in enumerate(leaves)
        for number in range(count)
    }
    # Leaves of different pods may have the same name: a domain is its whole path.
    return Topology((POD, LEAF), nodes)


def straddles(placement: PlacedUnits) -> tuple[int, int]:
    """How many units are in no single pod, and how many in no single leaf."""
    return sum(one.depth < 1 for one in placement.units), sum(one.depth < 2 for one in placement.units)


def fewest_straddles(pods: tuple[list[int], ...], unit: int, units: int) -> tuple[int, int]:
    """The same by trying every number of units in every leaf and pod."""

    def in_pod(leaves: list[int]) -> Iterator[tuple[int, int, int]]:
        for whole in itertools.product(*(range(free // unit + 1) for free in leaves)):
            left = sum(leaves) - unit * sum(whole)
            for joined in range(left // unit + 1):
                yield sum(whole), joined, left - unit * joined

    # (units in leaves, units in pods, nodes left over) that pods so far can have.
    reached = {(0, 0, 0)}
    for leaves in pods:
        mine = set(in_pod(leaves))
        reached = {(a + x, b + y, c + z) for a, b, c in reached for x, y, z in mine}
    across = {(units - whole - joined, joined, left) for whole, joined, left in reached}
    return min((far, far + joined) for far, joined, left in across if 0 <= far <= left // unit)


@given(
    pods=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    unit=st.integers(1, 4),
    data=st.data(),
)
def test_no_choice_of_nodes_has_fewer_units_that_straddle_pods_or_leaves(
    pods: list[list[int]], unit: int, data: st.DataObject
) -> None:
    most = sum(map(sum, pods)) // unit
    units = data.draw(st.integers(0, most))
    placement = place_units(tree(*pods), unit, units)
    assert straddles(placement) == fewest_straddles(tuple(pods), unit, units)


@given(
    pods=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    unit=st.integers(1, 5),
    data=st.data(),
)
def test_units_are_disjoint_whole_and_as_deep_as_they_say(
    pods: list[list[int]], unit: int, data: st.DataObject
) -> None:
    topology = tree(*pods)
    free = sum(map(sum, pods))
    units = data.draw(st.integers(0, free // unit))
    spares = data.draw(st.integers(0, free - unit * units))
    placement = place_units(topology, unit, units, spares)
    names = [*placement.nodes, *placement.spares]
    assert len(names) == len(set(names)) == unit * units + spares
    assert set(names) <= topology.nodes.keys()
    for one in placement.units:
        assert len(one.nodes) == unit
        paths = {topology.nodes[name] for name in one.nodes}
        together = max(level for level in range(3) if len({path[:level] for path in paths}) == 1)
        assert one.depth == together


def test_units_follow_the_tree_so_that_neighbors_are_near() -> None:
    placement = place_units(tree([4, 4], [4, 4]), 2, 8)
    pods = [name[:2] for name in placement.nodes]
    assert pods == sorted(pods)
    leaves = [name[:4] for name in placement.nodes]
    assert leaves == sorted(leaves)


def test_few_units_are_laid_into_one_pod_and_not_all_over() -> None:
    placement = place_units(tree([2, 2], [4, 4], [2, 2]), 2, 4)
    assert {name[:2] for name in placement.nodes} == {"p1"}


def test_spares_are_in_as_many_leaves_as_there_can_be() -> None:
    placement = place_units(tree([5, 5], [5, 5]), 4, 4, 4)
    assert len({name[:4] for name in placement.spares}) == 4


def test_the_fullest_fragments_are_joined_first() -> None:
    placement = place_units(tree([3, 2, 1, 2]), 4, 2)
    pieces = [len({name[:4] for name in one.nodes}) for one in placement.units]
    assert sorted(pieces) == [2, 3]


def test_too_few_nodes_are_refused_with_what_to_ask_for() -> None:
    with pytest.raises(
        TopologyError, match=r"2 units of 4 nodes and 1 spares need 9 nodes, and 8 of 8 are free"
    ):
        place_units(tree([4, 4]), 4, 2, 1)


def test_torn_units_are_refused_if_they_must_be_whole() -> None:
    with pytest.raises(
        TopologyError, match=r"1 of 2 units of 4 nodes would straddle domains of level leaf: at most 1"
    ):
        place_units(tree([4, 2, 2]), 4, 2, no_straddling=True)


def test_nodes_that_are_taken_are_not_placed() -> None:
    topology = tree([4, 4])
    placement = place_units(topology.only(["p0l0n1", "p0l1n2"]), 1, 2)
    assert set(placement.nodes) == {"p0l0n1", "p0l1n2"}


def test_usable_nodes_fall_with_the_size_of_units() -> None:
    # 18 trays of a rack, one of them dead: units of 16 leave one tray over, of 9 eight.
    racks = tree([17] * 4)
    assert [unit * most_units(racks, unit, no_straddling=True) for unit in (16, 9, 1)] == [64, 36, 68]


@given(
    domains=st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.lists(st.sampled_from("xy"), max_size=3).map(tuple),
        max_size=8,
    )
)
def test_nodes_that_name_fewer_domains_lie_alone_below(domains: dict[str, tuple[str, ...]]) -> None:
    topology = from_domains(domains)
    assert topology.nodes.keys() == domains.keys()
    depth = len(topology.levels)
    for name, path in domains.items():
        assert topology.nodes[name][: len(path)] == path
        if len(path) < depth:
            assert Counter(topology.nodes.values())[topology.nodes[name]] == 1

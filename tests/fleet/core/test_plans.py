"""Plans, copies and retention, against brute force and closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.small_fleets import running
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.plans import buddy_ring, needs_buddy
from phalanx.fleet.core.retention import droppable, may_begin
from phalanx.fleet.core.settings import Formation, formation_of
from phalanx.run.layout import layout_problems
from phalanx.run.spec import FleetSpec, RunSpec

RACKS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("123")), min_size=1, max_size=12)


@given(RACKS)
def test_each_seat_is_the_buddy_of_one_other_and_in_another_domain_where_that_can_be(
    domains: list[tuple[str, ...]],
) -> None:
    ring, level = buddy_ring(domains)
    assert sorted(ring) == list(range(len(domains)))
    assert len(domains) == 1 or all(seat != buddy for seat, buddy in enumerate(ring))
    assert not level or all(
        domains[seat][:level] != domains[buddy][:level] for seat, buddy in enumerate(ring)
    )
    most = max(domains.count(domain) for domain in domains)
    assert level or 2 * most > len(domains)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_ranks_that_differ_only_in_the_replicate_axis_hold_equal_state(
    pipeline: int, replicate: int, shard: int, model: int
) -> None:
    formation = Formation(1, (1,), pipeline, model, shard)
    ranks = pipeline * replicate * shard * model
    places = list(itertools.product(range(pipeline), range(replicate), range(shard), range(model)))
    assert formation.keys(ranks) == pipeline * shard * model
    for rank, other in itertools.product(range(ranks), repeat=2):
        equal = places[rank][0::2] + places[rank][3:] == places[other][0::2] + places[other][3:]
        assert (formation.key(ranks, rank) == formation.key(ranks, other)) == equal
        assert (other in formation.replicas(ranks, formation.key(ranks, rank))) == equal


def test_replicas_in_another_rack_make_buddies_needless() -> None:
    fleet = running(formation=Formation(1, (2, 4), shard_ranks=2))
    domains = [fleet.state.nodes[name].domain for name in fleet.state.seats]
    assert domains[0] != domains[2]
    assert not any(needs_buddy(fleet.state, fleet.state.seats, 4, rank) for rank in range(4))


def test_legal_sizes_come_from_the_run_file() -> None:
    spec = replace(RunSpec(), fleet=FleetSpec(nodes=3, workers_per_node=2))
    expected = tuple(ranks for ranks in range(1, 7) if not layout_problems(spec, ranks))
    assert formation_of(spec).legal == expected != ()
    with pytest.raises(ValueError, match=r"fleet\.nodes = 0"):
        formation_of(RunSpec())


def test_a_snapshot_may_go_only_when_a_newer_one_is_safe() -> None:
    held = tuple(m.RankSnapshot(2, 0, step, "own") for step in (3, 4))
    assert droppable(held, 3) == ()
    assert droppable(held, 4) == held[:1]
    assert may_begin(4, 4)
    assert not may_begin(4, 3)

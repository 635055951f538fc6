"""Plans, copies and retention, against brute force and closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, fleet_in_racks, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import (
    HOLDERS_NAMED,
    Crowd,
    bind,
    buddy_ring,
    copies_of,
    holders_for,
    is_needed,
    needs_buddy,
)
from phalanx.fleet.core.epochs.progress import droppable, may_begin
from phalanx.fleet.core.epochs.seating import common_levels
from phalanx.fleet.core.settings import Formation, formation_of
from phalanx.fleet.core.state import RestorePoint
from phalanx.run.layout import layout_of, layout_problems
from phalanx.run.smaller_degrees import divided_over
from phalanx.run.spec import FleetSpec, ModelSpec, MoeSpec, ParallelSpec, RunSpec, TrainSpec

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


def test_a_fleet_falls_to_a_smaller_tensor_degree_only_where_too_few_ranks_are_left_for_a_larger_one() -> (
    None
):
    model = ModelSpec(layers=2, dim=64, heads=8, ffn_dim=64, vocab_size=128, lanes=4)
    fleet = FleetSpec(nodes=9, least_tensor=1)
    spec = replace(RunSpec(model=model), parallel=ParallelSpec(tensor=4), fleet=fleet)
    formation = formation_of(spec)
    assert formation.legal == (1, 2, 4, 8)
    assert [formation.slot_ranks(ranks) for ranks in formation.legal] == [1, 2, 4, 4]
    assert [formation.largest(ranks) for ranks in range(10)] == [0, 1, 2, 2, 4, 4, 4, 4, 8, 8]
    assert formation_of(replace(spec, fleet=replace(fleet, least_tensor=2))).legal == (2, 4, 8)
    assert formation_of(replace(spec, fleet=replace(fleet, least_tensor=0))).legal == (4, 8)


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((0, 1, 2)),
)
def test_coordinator_and_workers_agree_on_how_any_number_of_ranks_divides_the_model(
    tensor: int, expert: int, pipeline: int, shard: int, least: int
) -> None:
    moe = MoeSpec(experts=4, per_token=2, ffn_dim=64)
    model = ModelSpec(layers=2, dim=64, heads=8, ffn_dim=64, vocab_size=128, lanes=4, moe=moe)
    parallel = ParallelSpec(tensor=tensor, expert=expert, pipeline=pipeline, shard_ranks=shard)
    train = TrainSpec(seq_len=32, batch_size=16, slots=16, micro_batch_size=1)
    spec = RunSpec(model=model, parallel=parallel, train=train, fleet=FleetSpec(nodes=13, least_tensor=least))
    try:
        formation = formation_of(spec)
    except ValueError:
        return
    for ranks in formation.legal:
        divided = divided_over(spec, ranks)
        assert not layout_problems(divided, ranks)
        layout = layout_of(divided.parallel, ranks)
        assert formation.slot_ranks(ranks) == layout.model_ranks
        assert formation.keys(ranks) == layout.pipeline * layout.shard * layout.model_ranks


def test_a_snapshot_may_go_only_when_a_newer_one_is_safe() -> None:
    snapshots = tuple(m.RankSnapshot(2, 0, step, "own") for step in (3, 4))
    assert droppable(snapshots, 3) == ()
    assert droppable(snapshots, 4) == snapshots[:1]
    assert may_begin(4, 4)
    assert not may_begin(4, 3)


@pytest.mark.parametrize(
    ("domains", "level"),
    [
        ([("a", "1"), ("b", "1"), ("a", "2"), ("b", "2")], 1),
        ([("a", "1"), ("a", "2"), ("a", "1"), ("a", "2")], 2),
        ([("a", "1"), ("a", "1"), ("a", "1"), ("b", "1")], 0),
        ([(), ()], 0),
    ],
    ids=["halls", "racks of one hall", "most in one rack", "unknown"],
)
def test_buddies_differ_in_the_widest_domain_that_allows_it(
    domains: list[tuple[str, ...]], level: int
) -> None:
    assert buddy_ring(domains)[1] == level


def test_a_member_restores_from_itself_then_from_the_nearest_holder() -> None:
    fleet = fleet_in_racks("r0", "r1", "r0", "r1", "r2", "r1")
    fleet.handle(m.Broken("0", 1, 0, 0))
    for name in fleet.state.seats:
        snapshots = tuple(m.RankSnapshot(4, rank, 5, "own", epoch=0) for rank in range(4))
        fleet.handle(m.Parked(name, 1, 0, (f"{name}:1",), snapshots))
    point = RestorePoint(4, 5)
    assert fleet.state.source == point
    for name in fleet.state.seats:
        node = fleet.state.nodes[name]
        named = [holder.node for holder in holders_for(fleet.state, point, node, {})]
        assert named[0] == name
        assert fleet.state.nodes[named[1]].domain == node.domain
        assert len(named) == 3
        assert fleet.state.nodes[named[2]].domain != node.domain


DOMAINS = st.lists(st.sampled_from("ab"), max_size=3).map(tuple)


@given(st.lists(DOMAINS, min_size=1, max_size=16), st.sets(st.integers(0, 15)), st.data())
def test_the_nearest_of_a_crowd_are_those_that_a_look_at_all_of_it_finds(
    domains: list[tuple[str, ...]], holding: set[int], data: st.DataObject
) -> None:
    fleet = Fleet(settings(20))
    for number, domain in enumerate(domains):
        fleet.handle(m.Joined(f"{number:02d}", 1, 1, "h", 7, domain, meeting_points=("h:1",)))
    nodes = fleet.state.nodes
    ranks = {name: int(name) for name in nodes if int(name) in holding}
    node = nodes[data.draw(st.sampled_from(sorted(nodes)))]

    def far(name: str) -> tuple[bool, int, str]:
        return name != node.name, -common_levels(nodes[name].domain, node.domain), name

    near = Crowd(fleet.state, ranks).near(node)
    assert sorted(near, key=far)[:HOLDERS_NAMED] == sorted(ranks, key=far)[:HOLDERS_NAMED]
    assert near.items() <= ranks.items()


@pytest.mark.parametrize("shard_ranks", [0, 2])
def test_members_of_a_fleet_with_many_replicas_get_the_same_binds_as_each_by_itself(shard_ranks: int) -> None:
    fleet = running(20, formation=Formation(1, tuple(range(2, 21, 2)), shard_ranks=shard_ranks))
    fleet.handle(m.Disconnected("3", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    binds = {name: command for name, command in fleet.sent if isinstance(command, c.Bind)}
    assert len(binds) == 20
    assert all(resumed(bind).ranks == 20 for bind in binds.values())
    assert binds == {name: bind(fleet.state, fleet.state.nodes[name], {}) for name in binds}


@pytest.mark.parametrize(
    ("racks", "victim", "spare", "kept"),
    [
        ("0101", 0, "2", True),
        ("0011", 1, "2", True),
        ("0101", 0, "1", False),
        ("00112", 1, "2", False),
        ("00112", 2, "2", False),
    ],
    ids=["as a new one", "unlike a new one", "no longer", "not for the one before", "not for the one after"],
)
def test_the_ring_of_buddies_stays_only_while_it_separates_racks(
    racks: str, victim: int, spare: str, kept: bool
) -> None:
    fleet = fleet_in_racks(*racks, spare, spare)
    before = list(fleet.state.ring)
    lost, other = fleet.state.seats[victim], fleet.state.seats[victim - 1]
    fleet.handle(m.Disconnected(lost, 1), m.Broken(other, 1, 0, 0))
    fleet.park()
    state = fleet.state
    assert state.nodes[state.seats[victim]].domain[1] == spare
    domains = [state.nodes[name].domain for name in state.seats]
    apart = all(domains[seat] != domains[buddy] for seat, buddy in enumerate(before))
    assert (apart, state.ring == before) == (kept, kept)


def test_the_newest_snapshot_of_which_all_is_held_is_restored() -> None:
    fleet = running(2, 0)
    fleet.handle(m.Broken("0", 1, 0, 0))
    for rank, (name, steps) in enumerate((("0", (5, 7)), ("1", (5, 7, 9)))):
        snapshots = tuple(m.RankSnapshot(2, rank, step, "own", epoch=0) for step in steps)
        fleet.handle(m.Parked(name, 1, 0, (f"{name}:1",), snapshots))
    assert fleet.state.source == RestorePoint(2, 7)


def test_a_rollcall_does_not_stand_for_snapshots_of_another_step() -> None:
    fleet = running(4, 0)
    fleet.handle(m.Broken("0", 1, 0, 0))
    later = m.RankSnapshot(4, fleet.state.seats.index("1"), 7, "own", epoch=0)
    fleet.handle(m.Parked("1", 1, 0, ("1:1",), (later,)), m.Rollcall("parked", 0, steps=(5,), absent=("1",)))
    assert fleet.state.source == RestorePoint(4, 5)


def test_a_rollcall_does_not_stand_for_snapshots_of_another_number_of_ranks() -> None:
    fleet = running(4, 0)
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    of_four = m.RankSnapshot(4, 2, 9, "own", epoch=0)
    fleet.handle(m.Joined("1", 2, 1, "1", 7, ("rack1",), meeting_points=("1:1",), snapshots=(of_four,)))
    fleet.handle(m.Broken("0", 1, 1, 0), m.Rollcall("parked", 1, steps=(9,)))
    assert fleet.state.source == RestorePoint(3, 9)


def test_where_replicas_make_buddies_needless_a_rollcall_names_the_replicas_alone() -> None:
    fleet = running(formation=Formation(1, (2, 4), shard_ranks=2))
    seats = list(fleet.state.seats)
    fleet.handle(m.Broken("0", 1, 0, 0), m.Rollcall("parked", 0, steps=(5,)))
    for key in range(2):
        copies = copies_of(fleet.state, RestorePoint(4, 5), key)
        assert copies == {seats[rank]: rank for rank in (key, key + 2)}


def test_a_rollcall_is_no_snapshot_of_what_an_absent_node_and_its_buddy_held() -> None:
    for both, source in ((True, c.FromDisk(2)), (False, RestorePoint(6, 5))):
        fleet = fleet_in_racks("r0", "r0", "r1", "r1", "r2", "r2", "r3", "r3")
        lost, buddy = fleet.state.seats[0], fleet.state.seats[fleet.state.ring[0]]
        assert fleet.state.ring[fleet.state.ring[0]] != 0, "the buddy's own state has another holder"
        absent = (lost, buddy) if both else (lost,)
        reporter = next(name for name in fleet.state.seats if name not in (lost, buddy))
        fleet.handle(m.DiskHolds((2,)), m.Broken(reporter, 1, 0, 0))
        fleet.handle(*(m.Disconnected(name, 1) for name in absent))
        fleet.handle(m.Rollcall("parked", 0, steps=(5,), absent=absent))
        assert fleet.state.source == source


def test_the_nearest_spare_takes_a_vacant_seat() -> None:
    fleet = Fleet(settings(4))
    halls = {"0": "a", "1": "a", "2": "b", "3": "b", "4": "b", "5": "a"}
    for name, hall in halls.items():
        domain = (hall, f"rack{name}")
        fleet.handle(m.Joined(name, 1, 1, name, 7, domain, meeting_points=(f"{name}:1",)))
    fleet.bind()
    assert fleet.state.seats == ["0", "1", "2", "3"]
    fleet.handle(m.Disconnected("0", 1), m.Broken("1", 1, 0, 0))
    fleet.park()
    assert fleet.state.seats == ["5", "1", "2", "3"], "node 5 is in the hall of the lost one, node 4 is not"


def binds_of_a_shrunken_fleet(nodes: int) -> list[c.Bind]:
    """The Binds of ``nodes - 1`` nodes of 8 workers, ZeRO-3 over all of them, that have lost one and have no spare."""
    formation = Formation(8, tuple(range(8, 8 * nodes + 1, 8)))
    fleet = Fleet(settings(nodes, formation=formation))
    points = tuple(f"10.0.0.1:{5000 + worker}" for worker in range(8))
    names = [f"node-{number:03d}" for number in range(nodes)]
    for name in names:
        fleet.handle(m.Joined(name, 1, 8, "10.0.0.1", 4000, meeting_points=points))
    fleet.bind()
    before, ring = list(fleet.state.seats), list(fleet.state.ring)
    fleet.handle(m.Disconnected(before[3], 1), m.Broken(before[4], 1, 0, 0))
    for seat, name in enumerate(before):
        if seat != 3:
            seats = (("own", seat), ("buddy", ring.index(seat)))
            snapshots = tuple(
                m.RankSnapshot(8 * nodes, rank, 5, "own" if kind == "own" else "buddy", epoch=0)
                for kind, held_seat in seats
                for rank in range(8 * held_seat, 8 * held_seat + 8)
            )
            fleet.handle(m.Parked(name, 1, 0, points, snapshots))
    return [command for _, command in fleet.sent if isinstance(command, c.Bind)]


def test_the_shares_of_all_members_name_holders_of_every_state_and_grow_with_the_fleet_alone() -> None:
    sizes = {}
    for nodes in (8, 32):
        binds = binds_of_a_shrunken_fleet(nodes)
        assert len(binds) == nodes - 1
        named = {rank for bind in binds for holder in resumed(bind).holders for rank in holder.ranks}
        assert named == set(range(8 * nodes))
        assert all(resumed(bind).shared and resumed(bind).holders for bind in binds)
        sizes[nodes] = [len(m.encode(bind)) for bind in binds]
    assert sum(sizes[32]) < 5 * sum(sizes[8])
    assert max(sizes[32]) < 1_000, "a node is named once, and not for each of its eight ranks"


def test_each_member_gets_holders_where_the_members_are_more_than_the_states() -> None:
    fleet = running(4, spares=0, formation=Formation(1, (1, 2, 3, 4), shard_ranks=1))
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=5)
    binds = [command for _, command in fleet.sent if isinstance(command, c.Bind)]
    assert [bind.ranks for bind in binds] == [3, 3, 3]
    assert all(resumed(bind).shared and resumed(bind).holders for bind in binds)


def test_a_bind_has_the_seconds_since_training_was_interrupted() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    assert [command.left_s_ago for _, command in fleet.sent if isinstance(command, c.Bind)] == [None, None]
    fleet.bind()
    fleet.handle(m.Broken("0", 1, 0, 0))
    fleet.handle(after_s=3.0)
    fleet.park()
    assert [command.left_s_ago for _, command in fleet.sent if isinstance(command, c.Bind)] == [3.0, 3.0]


def test_a_bind_with_a_holder_of_nothing_or_of_no_number_is_refused_by_the_field() -> None:
    (bind, *_) = binds_of_a_shrunken_fleet(8)
    message = m.encode(bind)
    ranks = b'"ranks":[%s]' % b",".join(b"%d" % rank for rank in resumed(bind).holders[0].ranks)
    for bad in (b'"ranks":[]', b'"ranks":[-1]', b'"ranks":7', b'"rank":7'):
        with pytest.raises(msgspec.ValidationError, match=r"holders\[0\]"):
            c.decode_command(message.replace(ranks, bad, 1))
    for end in range(0, len(message), 7):
        with pytest.raises(msgspec.DecodeError):
            c.decode_command(message[:end])


def resumed(bind: c.Bind) -> c.FromMemory:
    assert isinstance(bind.resume, c.FromMemory)
    return bind.resume


def test_the_last_node_without_which_no_epoch_can_be_is_needed() -> None:
    fleet = running(2, 0)
    assert not is_needed(fleet.state, "0")
    fleet.handle(m.Drain("0"))
    assert is_needed(fleet.state, "1")
    assert not is_needed(fleet.state, "0")

"""The reduce-scatter over slots, in one level and in two, a thread for each rank, against a tree added up in one place."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from parallel.reduction.thread_groups import Group, all_gather, all_to_all, in_one_place, leaves_of, on_ranks
from phalanx.hardware.local.device import CommClock
from phalanx.parallel.divisions import Deal, rounds_of
from phalanx.parallel.mesh import TwoLevels
from phalanx.parallel.reduction import reduce_scatter as scattering
from phalanx.parallel.reduction import tree as reduction
from phalanx.parallel.reduction.reduce_scatter import TimedAllGather, TreeReduceScatter
from phalanx.parallel.reduction.tree import Intake, Leaves, TreeReducer

SHARE = 3


@pytest.fixture(autouse=True)
def _threads_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattering.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(reduction, "all_gather_single", all_gather)
    monkeypatch.setattr(scattering, "all_gather_single", all_gather)


Lines = list[tuple[list[Any], threading.Barrier]]


def lines(number: int, ranks: int) -> Lines:
    """Board and barrier of each of ``number`` groups, which its members share."""
    return [([None] * ranks, threading.Barrier(ranks)) for _ in range(number)]


def stepped(reduce_scatter: TreeReduceScatter, values: Tensor, group: Group) -> Tensor:
    """This rank's share of the sum after all its rounds, whose gradients are rows of ``values``."""
    reducer, out = reduce_scatter.reducer, torch.empty(SHARE)
    for current in rounds_of(reducer.leaves.deal, reducer.mesh.replica, group.rank):
        reducer.intake.round = current
        gradient = values[current.slot].clone()
        out.fill_(torch.nan)
        reduce_scatter(out, gradient, group, None)  # type: ignore[arg-type]
        gradient.fill_(torch.nan)  # FSDP2 uses its buffers again
        assert current.last or torch.equal(out, torch.zeros(SHARE))
        kept = reducer.tree.nodes.values()
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in kept)
    assert not reducer.tree.nodes
    assert not reducer.unsharded.nodes
    return out


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("slots", "replicas"), [(5, 1), (8, 1), (7, 2), (2, 2)])
def test_each_rank_gets_its_share_of_the_sum_after_the_last_round(
    slots: int, replicas: int, contiguous: bool
) -> None:
    leaves = Leaves(Deal(slots, replicas, 2, contiguous=contiguous), 1)
    values = leaves_of(slots, 2 * SHARE)
    rows, columns = lines(replicas, 2), lines(2, replicas)

    def rank_of(everyone: Group) -> Tensor:
        # Ranks 0 and 1 are the first replica, ranks 2 and 3 the second; equal shares are summed over replicas.
        shard, replica = everyone.rank % 2, everyone.rank // 2
        replicate = Group(replica, *columns[shard])
        mesh: Any = SimpleNamespace(
            replica=replica, replicas=replicas, replicate_group=replicate, shard_rank=shard
        )
        reducer = TreeReducer("group", mesh, leaves, Intake())
        reduce_scatter = TreeReduceScatter(reducer, CommClock(blocking=True))
        out = stepped(reduce_scatter, values, Group(shard, *rows[replica]))
        assert reduce_scatter.clock.total_ns > 0
        return out

    expected = torch.split(in_one_place(values), SHARE)
    for rank, out in enumerate(on_ranks(2 * replicas, rank_of)):
        assert torch.equal(out, expected[rank % 2])


@examples(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 40), st.booleans())
def test_exchanging_inside_machines_first_gives_the_same_bits_for_any_number_of_ranks_and_slots(
    machines: int, width: int, slots: int, contiguous: bool
) -> None:
    leaves = Leaves(Deal(slots, 1, machines * width, contiguous=contiguous), 1)
    values = leaves_of(slots, machines * width * SHARE).bfloat16().float()
    inside, across = lines(machines, width), lines(width, machines)

    def rank_of(everyone: Group) -> Tensor:
        machine, place = divmod(everyone.rank, width)
        groups: list[Any] = [Group(place, *inside[machine]), Group(machine, *across[place])]
        mesh: Any = SimpleNamespace(replica=0, replicas=1, shard_rank=everyone.rank)
        reducer = TreeReducer("group", mesh, leaves, Intake())
        levels = TwoLevels(groups[0], groups[1], machine)
        narrow = TreeReduceScatter(reducer, CommClock(blocking=True), levels, torch.bfloat16)
        return stepped(narrow, values, everyone)

    assert torch.equal(torch.cat(on_ranks(machines * width, rank_of)), in_one_place(values))


@examples(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16]))
def test_contiguous_slots_have_the_same_bits_in_either_wire_dtype(
    ranks: int, slots: int, wire: torch.dtype
) -> None:
    leaves = Leaves(Deal(slots, 1, ranks, contiguous=True), 1)
    values = leaves_of(slots, ranks * SHARE).bfloat16().float()
    (line,) = lines(1, ranks)

    def rank_of(everyone: Group) -> Tensor:
        mesh: Any = SimpleNamespace(replica=0, replicas=1, shard_rank=everyone.rank)
        reducer = TreeReducer("group", mesh, leaves, Intake())
        return stepped(
            TreeReduceScatter(reducer, CommClock(blocking=True), wire=wire),
            values,
            Group(everyone.rank, *line),
        )

    assert torch.equal(torch.cat(on_ranks(ranks, rank_of)), in_one_place(values))


def test_a_machine_passes_on_one_sum_of_all_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    machines, width = 2, 4
    slots = machines * width
    inside, across = lines(machines, width), lines(width, machines)
    passed_on: list[int] = []

    def counted(received: Tensor, sent: Tensor, *splits: list[int], group: Group) -> None:
        if group.size() == machines:
            passed_on.append(len(sent))
        all_to_all(received, sent, *splits, group=group)

    monkeypatch.setattr(scattering.dist, "all_to_all_single", counted)

    def rank_of(everyone: Group) -> Tensor:
        machine, place = divmod(everyone.rank, width)
        groups: list[Any] = [Group(place, *inside[machine]), Group(machine, *across[place])]
        mesh: Any = SimpleNamespace(replica=0, replicas=1, shard_rank=everyone.rank)
        reducer = TreeReducer("group", mesh, Leaves(Deal(slots, 1, slots), 1), Intake())
        levels = TwoLevels(groups[0], groups[1], machine)
        return stepped(TreeReduceScatter(reducer, CommClock(blocking=True), levels), values, everyone)

    values = leaves_of(slots, slots * SHARE)
    on_ranks(slots, rank_of)
    assert passed_on == [machines * SHARE] * slots  # in one level: slots * SHARE from every rank


def test_an_all_gather_has_its_time_measured_and_its_buffers_where_fsdp_wants_them() -> None:
    clock = CommClock(blocking=True)
    buffer = TimedAllGather(clock).allocate((2, 3), dtype=torch.bfloat16, device=torch.device("meta"))
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((2, 3), torch.bfloat16, "meta")
    out = torch.empty(4)
    group = Group(0, [None], threading.Barrier(1))
    assert TimedAllGather(clock)(out, torch.arange(4.0), group) is None  # type: ignore[arg-type]
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert clock.total_ns > 0

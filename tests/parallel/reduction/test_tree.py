"""The sum over slots, shard ranks and replicas, a thread for each rank, against the same tree added up in one place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.slots import Deal, rounds_of
from phalanx.parallel.reduction import tree as reduction
from phalanx.parallel.reduction.slot_tree import Leaves, SlotTree
from phalanx.parallel.reduction.tree import Intake, TimedAllGather, TreeReducer, TreeReduceScatter, exchange


class Group:
    """A process group whose members are threads; each has its own ``Group``, and all share ``board``."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.board, self.barrier = rank, board, barrier

    def size(self) -> int:
        return len(self.board)

    def told_by_all(self, own: Any) -> list[Any]:
        self.board[self.rank] = own
        self.barrier.wait(60)
        told = list(self.board)
        self.barrier.wait(60)
        return told


def all_to_all(
    received: Tensor,
    sent: Tensor,
    get: list[int] | None = None,
    give: list[int] | None = None,
    *,
    group: Group,
) -> None:
    pieces = torch.split(sent.clone(), give or len(sent) // group.size())
    mine = [theirs[group.rank] for theirs in group.told_by_all(pieces)]
    assert get is None or get == [len(piece) for piece in mine]
    received.copy_(torch.cat(mine))


def all_gather(output: Tensor, piece: Tensor, group: Group) -> None:
    output.copy_(torch.cat(group.told_by_all(piece.clone())))


@pytest.fixture(autouse=True)
def _threads_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(reduction, "all_gather_single", all_gather)


def on_ranks(ranks: int, function: Callable[[Group], Tensor]) -> list[Tensor]:
    """The values that each of ``ranks`` threads returns; all of them are in one group."""
    board, barrier = [None] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> Tensor:
        try:
            return function(Group(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def of_replica(replica: int, replicas: int, group: Group | None = None) -> Any:
    """The part of a mesh that the reducers use."""
    return SimpleNamespace(replica=replica, replicas=replicas, replicate_group=group)


def in_one_place(values: Tensor) -> Tensor:
    """The sum of leaves ``(leaves, elements)`` in tree order."""
    tree: SlotTree[Tensor] = SlotTree(len(values), torch.add)
    for leaf, value in enumerate(values):
        tree.push(leaf, value)
    return tree.take_root()


def leaves_of(count: int, elements: int) -> Tensor:
    """Values whose sum depends on the order of additions."""
    return torch.randn(count, elements, generator=torch.Generator().manual_seed(count)).exp().pow(5)


@examples(max_examples=40)
@given(st.integers(2, 4), st.integers(0, 7), st.integers(1, 2), st.integers(1, 9))
def test_every_replica_gets_the_sum_that_one_alone_would_have(
    replicas: int, more_slots: int, per_hand: int, elements: int
) -> None:
    leaves = Leaves(Deal(replicas + more_slots, replicas, 1), per_hand)
    values = leaves_of(leaves.count, elements)

    def add_up(group: Group) -> Tensor:
        own: SlotTree[Tensor] = SlotTree(leaves.count, torch.add)
        hands = leaves.deal.hands_of_replica(group.rank)
        for leaf in range(hands.start * per_hand, hands.stop * per_hand):
            own.push(leaf, values[leaf].clone())
        nodes = [own.nodes[node] for node in leaves.forest(group.rank)]
        out = torch.full((elements,), torch.nan)
        exchange(nodes, leaves, of_replica(group.rank, replicas, group), out)
        return out

    expected = in_one_place(values)
    assert all(torch.equal(out, expected) for out in on_ranks(replicas, add_up))


@pytest.mark.parametrize(("slots", "replicas"), [(5, 1), (8, 1), (7, 2)])
def test_a_reduce_scatter_leaves_each_rank_its_share_of_the_sum_after_the_last_round(
    slots: int, replicas: int
) -> None:
    leaves, share = Leaves(Deal(slots, replicas, 2), 1), 3
    values = leaves_of(slots, 2 * share)

    def step(group: Group, mesh: Any) -> Tensor:
        intake = Intake()
        reducer = TreeReducer("group", mesh, leaves, intake)
        reduce_scatter = TreeReduceScatter(reducer, CommClock(blocking=True))
        out = torch.empty(share)
        for current in rounds_of(leaves.deal, mesh.replica, group.rank):
            intake.round = current
            gradient = values[current.slot].clone()
            out.fill_(torch.nan)
            reduce_scatter(out, gradient, group, None)  # type: ignore[arg-type]
            gradient.fill_(torch.nan)  # FSDP2 uses its buffers again
            assert current.last or torch.equal(out, torch.zeros(share))
            kept = reducer.tree.nodes.values()
            assert all(value.untyped_storage().nbytes() == value.nbytes for value in kept)
        assert reduce_scatter.clock.total_ns > 0
        assert not reducer.tree.nodes
        return out

    def rank_of(everyone: Group) -> Tensor:
        # Ranks 0 and 1 are the first replica, ranks 2 and 3 the second; equal shares are summed over replicas.
        shard, replica = everyone.rank % 2, everyone.rank // 2
        group = Group(shard, *rows[replica])
        return step(group, of_replica(replica, replicas, Group(replica, *columns[shard])))

    rows = [([None] * 2, threading.Barrier(2)) for _ in range(replicas)]
    columns = [([None] * replicas, threading.Barrier(replicas)) for _ in range(2)]
    expected = torch.split(in_one_place(values), share)
    for rank, out in enumerate(on_ranks(2 * replicas, rank_of)):
        assert torch.equal(out, expected[rank % 2])


def test_a_gradient_that_only_one_rank_holds_becomes_the_sum_in_its_own_buffer() -> None:
    leaves = Leaves(Deal(5, 1, 1), 1)
    values = leaves_of(5, 3)
    reducer = TreeReducer("group", of_replica(0, 1), leaves, Intake())
    gradient = torch.empty(3)
    for current in rounds_of(leaves.deal, 0, 0):
        reducer.intake.round = current
        gradient.copy_(values[current.slot])
        reducer.take_alone(gradient)
        assert current.last or torch.equal(gradient, values[current.slot])
    assert torch.equal(gradient, in_one_place(values))


def test_a_gradient_that_is_not_admitted_is_left_out_of_the_tree() -> None:
    asked = []

    def refuse(name: str, gradient: Tensor) -> bool:
        asked.append((name, gradient.tolist()))
        return False

    (current,) = rounds_of(Deal(1, 1, 1), 0, 0)
    reducer = TreeReducer(
        "group", of_replica(0, 1), Leaves(Deal(1, 1, 1), 1), Intake(current, slot_complete=True, admit=refuse)
    )
    out, group = torch.ones(2), Group(0, [None], threading.Barrier(1))
    TreeReduceScatter(reducer, CommClock(blocking=True))(out, torch.tensor([2.0, 3.0]), group, None)  # type: ignore[arg-type]
    reducer.take_alone(torch.tensor([4.0, 5.0]))
    assert asked == [("group", [2.0, 3.0]), ("group", [4.0, 5.0])]
    assert out.tolist() == [0.0, 0.0]
    assert not reducer.tree.nodes


def test_the_tree_keeps_no_buffer_of_which_it_needs_only_a_part() -> None:
    leaves = Leaves(Deal(6, 1, 2), 1)
    reducer = TreeReducer("group", of_replica(0, 1), leaves, Intake())
    for current in rounds_of(leaves.deal, 0, 0)[:2]:
        reducer.intake.round = current
        reducer.push(torch.ones(2, 4))
        reducer.keep()
    ((node, value),) = reducer.tree.nodes.items()
    assert (node, value.tolist()) == ((2, 0), [4.0] * 4)
    assert value.untyped_storage().nbytes() == value.nbytes
    kept = value.data_ptr()
    reducer.keep()
    assert reducer.tree.nodes[node].data_ptr() == kept, "what is its own already is not copied"


def test_an_all_gather_has_its_time_measured_and_its_buffers_where_fsdp_wants_them() -> None:
    clock = CommClock(blocking=True)
    buffer = TimedAllGather(clock).allocate((2, 3), dtype=torch.bfloat16, device=torch.device("meta"))
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((2, 3), torch.bfloat16, "meta")
    out = torch.empty(4)
    group = Group(0, [None], threading.Barrier(1))
    assert TimedAllGather(clock)(out, torch.arange(4.0), group) is None  # type: ignore[arg-type]
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert clock.total_ns > 0

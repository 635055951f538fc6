"""The sum over slots and replicas, a thread for each rank, against the same tree added up in one place."""

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
from phalanx.parallel.reduction import tree as reduction
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.parallel.reduction.tree import Intake, Leaves, SlotTree, TreeReducer, exchange


@pytest.fixture(autouse=True)
def _threads_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(reduction, "all_gather_single", all_gather)


def of_replica(replica: int, replicas: int, group: Group | None = None) -> Any:
    """The part of a mesh that the reducers use."""
    return SimpleNamespace(replica=replica, replicas=replicas, replicate_group=group)


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


def test_a_gradient_that_only_one_rank_holds_becomes_the_sum_in_its_own_buffer() -> None:
    leaves = Leaves(Deal(5, 1, 1), 1)
    values = leaves_of(5, 3)
    reducer = TreeReducer("group", of_replica(0, 1), leaves, Intake())
    buffers = []
    for current in rounds_of(leaves.deal, 0, 0):
        reducer.intake.round = current
        buffers.append(values[current.slot].clone())
        reducer.take_alone(buffers[-1])
    assert torch.equal(buffers[-1], in_one_place(values))
    assert not reducer.tree.nodes


def test_a_gradient_that_only_one_rank_holds_enters_the_tree_without_a_copy() -> None:
    leaves = Leaves(Deal(2, 1, 1), 1)
    reducer = TreeReducer("group", of_replica(0, 1), leaves, Intake())
    (first, _) = rounds_of(leaves.deal, 0, 0)
    reducer.intake.round = first
    gradient = torch.ones(3)
    reducer.take_alone(gradient)
    (node,) = reducer.tree.nodes.values()
    assert node.data_ptr() == gradient.data_ptr()


def test_a_gradient_that_is_not_admitted_is_left_out_of_the_tree() -> None:
    refused = []

    def refuse(name: str, gradient: Tensor) -> bool:
        refused.append((name, gradient.tolist()))
        return False

    (current,) = rounds_of(Deal(1, 1, 1), 0, 0)
    reducer = TreeReducer(
        "group", of_replica(0, 1), Leaves(Deal(1, 1, 1), 1), Intake(current, slot_complete=True, admit=refuse)
    )
    out, group = torch.ones(2), Group(0, [None], threading.Barrier(1))
    TreeReduceScatter(reducer, CommClock(blocking=True))(out, torch.tensor([2.0, 3.0]), group, None)  # type: ignore[arg-type]
    reducer.take_alone(torch.tensor([4.0, 5.0]))
    assert refused == [("group", [2.0, 3.0]), ("group", [4.0, 5.0])]
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

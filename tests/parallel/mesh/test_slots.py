"""The tree in which slots are added, and how slots are dealt."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.divisions import Deal, Round, rounds_of
from phalanx.parallel.reduction.tree import Leaves, SlotTree, leaf_sums

slots_counts = st.integers(1, 40)


def written_out(low: int, level: int, slots: int) -> str:
    """The sum that the tree stands for, by recursion from the top: an independent definition."""
    if low >= slots:
        return ""
    if level == 0:
        return str(low)
    left, right = written_out(low, level - 1, slots), written_out(low + (1 << level - 1), level - 1, slots)
    return f"({left}+{right})" if right else left


def text_tree(slots: int) -> SlotTree[str]:
    return SlotTree(slots, lambda left, right: f"({left}+{right})")


@given(slots_counts, st.randoms())
def test_slots_are_added_in_the_same_tree_in_any_order_of_arrival(
    slots: int, shuffler: random.Random
) -> None:
    order = list(range(slots))
    shuffler.shuffle(order)
    tree = text_tree(slots)
    for slot in order:
        tree.push(slot, str(slot))
    assert tree.take_root() == written_out(0, (slots - 1).bit_length(), slots)


@given(slots_counts, st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_the_sum_is_the_same_however_slots_are_dealt_over_replicas(
    slots: int, replicas: int, shard_ranks: int, per_hand: int
) -> None:
    leaves = Leaves(Deal(slots, replicas, shard_ranks), per_hand)
    merged = text_tree(leaves.count)
    for replica in range(replicas):
        own = text_tree(leaves.count)
        for round_slots in leaves.deal.rounds(replica):
            for leaf in leaves.of_round(Round(round_slots, 0, counts=True, last=False)):
                own.push(leaf, str(leaf))
        assert sorted(own.nodes) == sorted(leaves.forest(replica))
        for node, value in own.nodes.items():
            merged.push_node(node, value)
    assert merged.take_root() == written_out(0, (leaves.count - 1).bit_length(), leaves.count)


@given(slots_counts, st.integers(1, 9), st.integers(1, 5))
def test_the_sum_is_the_same_if_each_rank_adds_its_own_contiguous_slots_first(
    slots: int, replicas: int, shard_ranks: int
) -> None:
    leaves = Leaves(Deal(slots, replicas, shard_ranks, contiguous=True), 1)
    merged = text_tree(leaves.count)
    for replica in range(replicas):
        for shard_rank, forest in enumerate(leaves.forests_of_ranks(replica)):
            own = text_tree(leaves.count)
            for current in rounds_of(leaves.deal, replica, shard_rank):
                if current.counts:
                    own.push(current.slot, str(current.slot))
            assert sorted(own.nodes) == sorted(forest)
            for node, value in own.nodes.items():
                merged.push_node(node, value)
    assert merged.take_root() == written_out(0, (leaves.count - 1).bit_length(), leaves.count)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_a_team_is_dealt_its_slots_together_and_its_sums_are_nodes_of_the_tree_over_slots(
    hands: int, replicas: int, teams: int, team: int
) -> None:
    deal = Deal(hands * team, replicas, teams * team, team)
    over_hands, over_slots = text_tree(Leaves(deal, 1).count), text_tree(deal.slots)
    for replica in range(replicas):
        for round_slots in deal.rounds(replica):
            for leaf in Leaves(deal, 1).of_round(Round(round_slots, 0, counts=True, last=False)):
                own = text_tree(deal.slots)
                for slot in range(leaf * team, (leaf + 1) * team):
                    assert slot in round_slots
                    own.push(slot, str(slot))
                    over_slots.push(slot, str(slot))
                (text,) = own.nodes.values()
                over_hands.push(leaf, text)
    assert over_hands.take_root() == over_slots.take_root()


@given(slots_counts, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_every_slot_is_computed_exactly_once_and_counts_once(
    slots: int, replicas: int, shard_ranks: int, contiguous: bool
) -> None:
    deal = Deal(slots, replicas, shard_ranks, contiguous=contiguous)
    counted = [
        current.slot
        for replica in range(replicas)
        for shard_rank in range(shard_ranks)
        for current in rounds_of(deal, replica, shard_rank)
        if current.counts
    ]
    assert sorted(counted) == list(range(slots))


@given(slots_counts, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_the_ranks_of_a_replica_always_have_equally_many_rounds(
    slots: int, replicas: int, shard_ranks: int, contiguous: bool
) -> None:
    deal = Deal(slots, replicas, shard_ranks, contiguous=contiguous)
    for replica in range(replicas):
        rounds = [rounds_of(deal, replica, shard_rank) for shard_rank in range(shard_ranks)]
        assert len({len(own) for own in rounds}) == 1
        assert all(own[-1].last and not any(r.last for r in own[:-1]) for own in rounds if own)


@given(slots_counts, st.integers(1, 9))
def test_what_a_replica_is_left_with_are_its_own_leaves_from_left_to_right(slots: int, replicas: int) -> None:
    leaves = Leaves(Deal(slots, replicas, 1), 1)
    for replica in range(replicas):
        below = [range(i << level, min((i + 1) << level, slots)) for level, i in leaves.forest(replica)]
        own = leaves.deal.hands_of_replica(replica)
        assert [leaf for part in below for leaf in part] == list(own)


def test_a_rank_without_a_slot_computes_its_teams_first_one_again_and_drops_the_result() -> None:
    deal = Deal(slots=6, replicas=1, shard_ranks=4, team=2)
    last = [rounds_of(deal, 0, rank)[-1] for rank in range(4)]
    assert [(current.slot, current.counts) for current in last] == [
        (4, True),
        (5, True),
        (4, False),
        (5, False),
    ]


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_replica_whose_slots_fill_a_subtree_has_one_sum_to_send(log_slots: int, log_replicas: int) -> None:
    slots, replicas = 1 << max(log_slots, log_replicas), 1 << log_replicas
    leaves = Leaves(Deal(slots, replicas, 1), 1)
    assert all(len(leaves.forest(replica)) == 1 for replica in range(replicas))


def test_a_sum_is_refused_while_slots_are_missing() -> None:
    tree = text_tree(4)
    tree.push(0, "0")
    tree.push(3, "3")
    with pytest.raises(ValueError, match="slots are missing"):
        tree.take_root()


def test_a_slot_given_twice_is_refused() -> None:
    tree = text_tree(4)
    tree.push(2, "2")
    with pytest.raises(ValueError, match="twice"):
        tree.push(2, "2")


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        text_tree(4).push(slot, "")


def test_the_tree_is_no_higher_than_its_slots_need() -> None:
    assert [text_tree(slots).root_node for slots in (1, 2, 3, 4, 5, 8)] == [
        (height, 0) for height in (0, 1, 2, 2, 3, 3)
    ]


@given(slots_counts, st.data())
def test_a_run_of_slots_is_added_as_one_slot_after_another_would_be(slots: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(slots)
    values = torch.randn(slots, 3, generator=generator)
    one_by_one: SlotTree[torch.Tensor] = SlotTree(slots, lambda left, right: left + right)
    in_runs: SlotTree[torch.Tensor] = SlotTree(slots, lambda left, right: left + right)
    first = 0
    while first < slots:
        length = data.draw(st.integers(1, slots - first))
        sums, rows = (
            leaf_sums(slots, range(first, first + length), values.device),
            values[first : first + length].clone(),
        )
        sums.add(rows)
        for node, row in sums.remaining:
            in_runs.push_node(node, rows[row])
        first += length
    for slot in range(slots):
        one_by_one.push(slot, values[slot])
    assert torch.equal(in_runs.take_root(), one_by_one.take_root())


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_the_most_rounds_are_those_of_the_replica_with_the_most_slots(
    hands: int, replicas: int, teams: int, team: int
) -> None:
    deal = Deal(hands * team, replicas, teams * team, team)
    assert deal.most_rounds == max(len(deal.rounds(replica)) for replica in range(replicas))

"""Nodes in the rows of a tensor, added a level at a time, against the tree that takes one after another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.parallel.divisions import Deal
from phalanx.parallel.reduction.tree import Leaves, SlotTree, level_sums

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    """Counts operations that run a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        views = ("view", "slice", "select", "as_strided", "alias")
        self.count += not any(name in str(func) for name in views)
        return func(*args, **(kwargs or {}))


def leaves_of(count: int, elements: int) -> Tensor:
    """Values whose sum depends on the order of additions."""
    return torch.randn(count, elements, generator=torch.Generator().manual_seed(count)).exp().pow(5)


@given(st.integers(1, 200), st.data())
def test_any_contiguous_leaves_become_the_nodes_that_the_tree_makes_of_them(
    count: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(first + 1, count))
    values = leaves_of(end - first, 3)
    tree: SlotTree[Tensor] = SlotTree(count, torch.add)
    for leaf in range(first, end):
        tree.push(leaf, values[leaf - first].clone())
    sums = level_sums(count, [(0, leaf) for leaf in range(first, end)], CPU)
    sums.add(values)
    assert {node for node, _ in sums.remaining} == tree.nodes.keys()
    assert [node[1] << node[0] for node, _ in sums.remaining] == sorted(
        node[1] << node[0] for node in tree.nodes
    )
    assert all(torch.equal(values[row], tree.nodes[node]) for node, row in sums.remaining)


@given(st.integers(1, 60), st.integers(0, 100), st.integers(1, 3))
def test_what_replicas_are_left_with_becomes_the_root(replicas: int, more: int, per_hand: int) -> None:
    leaves = Leaves(Deal(replicas + more, replicas, 1), per_hand)
    nodes = [node for replica in range(replicas) for node in leaves.forest(replica)]
    values = leaves_of(len(nodes), 2)
    tree: SlotTree[Tensor] = SlotTree(leaves.count, torch.add)
    for node, value in zip(nodes, values, strict=True):
        tree.push_node(node, value.clone())
    sums = level_sums(leaves.count, nodes, CPU)
    sums.add(values)
    ((node, row),) = sums.remaining
    assert node == tree.root_node
    assert torch.equal(values[row], tree.take_root())


def test_thousands_of_replicas_are_few_launches_whether_slots_divide_evenly_or_not() -> None:
    for replicas, most in ((2048, 11), (1999, 4 * 14)):
        leaves = Leaves(Deal(8 * 2048, replicas, 1), 1)
        nodes = [node for replica in range(replicas) for node in leaves.forest(replica)]
        sums, rows = level_sums(leaves.count, nodes, CPU), torch.ones(len(nodes), 1)
        with Launches() as launches:
            sums.add(rows)
        assert launches.count <= most
        assert rows[sums.remaining[0][1]].item() == len(nodes)

"""Orders of ranks: the neighbors of a node or of a place in the mesh lie next to each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.layout import Layout, rank_place
from phalanx_watch.ranks import in_order, orders

degree = st.integers(1, 3)


@given(replicate=degree, shard=degree, pipeline=degree, tensor=degree, data=st.data())
def test_along_an_axis_ranks_are_sorted_by_their_place_on_it_and_then_by_number(
    replicate: int, shard: int, pipeline: int, tensor: int, data: st.DataObject
) -> None:
    layout = Layout(replicate=replicate, shard=shard, pipeline=pipeline, tensor=tensor)
    axis = data.draw(st.sampled_from(sorted(layout.degrees)))
    order = in_order(axis, layout.ranks, layout, {}).tolist()
    assert order == sorted(range(layout.ranks), key=lambda rank: (rank_place(layout, rank)[axis], rank))


@given(st.dictionaries(st.integers(0, 40), st.sampled_from(["n2", "n10", "n9", "gpu-1-3", "gpu-1-12"])))
def test_ranks_of_a_node_are_neighbors_and_nodes_are_sorted_as_people_count(nodes: dict[int, str]) -> None:
    names = ["gpu-1-3", "gpu-1-12", "n2", "n9", "n10"]
    order = in_order("node", 30, None, nodes).tolist()
    place = {rank: names.index(nodes[rank]) if rank in nodes else len(names) for rank in range(30)}
    assert order == sorted(range(30), key=lambda rank: (place[rank], rank))


def test_only_orders_that_make_a_difference_are_offered() -> None:
    assert orders(None, {}) == ["rank"]
    assert orders(Layout(shard=8), {0: "a"}) == ["rank", "node"]
    assert orders(Layout(shard=8, tensor=2), {}) == ["rank", "shard", "tensor"]
    assert in_order("tensor", 7, Layout(shard=8, tensor=2), {}).tolist() == list(range(7))


def test_digits_that_are_no_number_are_letters_of_a_node() -> None:
    assert in_order("node", 2, None, {0: "b5²", 1: "a"}).tolist() == [1, 0]

"""Prices against a count message by message, and the certificate against every other placement."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.placing.small_trees import messages
from phalanx.launch.placing import Level, Shape, Topology, TopologyError, sequence
from phalanx.run.layout import Layout
from phalanx_plan.placing import choices, leaving, price, verify
from phalanx_plan.step_cost.traffic import Flow


@st.composite
def flows_of(draw: st.DrawFn) -> tuple[Flow, int]:
    size, stride, blocks = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pattern = draw(st.sampled_from(("ring", "all_to_all", "chain")))
    return Flow("axis", pattern, size, stride, draw(st.sampled_from((1.0, 6.0)))), size * stride * blocks


@given(given_flow=flows_of(), data=st.data())
def test_what_leaves_a_domain_is_the_sum_of_the_messages_that_do(
    given_flow: tuple[Flow, int], data: st.DataObject
) -> None:
    flow, ranks = given_flow
    near = np.array(data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
    expected = np.zeros(4)
    for sender, receiver, sent in messages(flow, ranks):
        if near[sender] != near[receiver]:
            expected[near[sender]] += sent
    np.testing.assert_allclose(leaving([flow], near, near, 4), expected)


@given(given_flow=flows_of(), scale_up=st.booleans(), data=st.data())
def test_a_price_is_the_sum_of_messages_between_nodes_however_ranks_divide_into_nodes(
    given_flow: tuple[Flow, int], scale_up: bool, data: st.DataObject
) -> None:
    flow, ranks = given_flow
    per_node = data.draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    seats = [f"n{number}" for number in range(ranks // per_node)]
    leaves = {name: (str(data.draw(st.integers(0, 2))),) for name in seats}
    out_of_leaf: Counter[tuple[str, ...]] = Counter()
    over_nic: Counter[str] = Counter()
    for sender, receiver, sent in messages(flow, ranks):
        here, there = seats[sender // per_node], seats[receiver // per_node]
        crosses = leaves[here] != leaves[there]
        out_of_leaf[leaves[here]] += sent * crosses
        over_nic[here] += sent * (crosses if scale_up else here != there)
    sizes = Counter(leaves.values())
    found = price(Topology((Level("leaf", 0.5, scale_up),), leaves, 2.0), seats, [flow], per_node)
    expected = max(sent / sizes[leaf] for leaf, sent in out_of_leaf.items())
    assert found.uplink_s["leaf"] == pytest.approx(expected)
    assert found.nic_s == pytest.approx(max(over_nic.values()) / 2)
    assert found.left_bytes == pytest.approx({"leaf": sum(out_of_leaf.values())})


DATA = Flow("shard", "ring", 4, 1, 8.0)
STAGES = Flow("pipeline", "chain", 2, 2, 100.0)
TWO_LEAVES = Topology((Level("leaf"),), {"a": ("x",), "b": ("y",), "c": ("x",), "d": ("y",)}, 1.0)


def test_a_certificate_means_that_every_other_order_of_the_nodes_is_as_slow() -> None:
    flow = Flow("shard", "ring", 8, 1, 8.0)
    best = choices(TWO_LEAVES, Shape(Layout(shard=8), 2), [flow])[0]
    assert best.price.certified
    for order in itertools.permutations(TWO_LEAVES.nodes):
        assert price(TWO_LEAVES, order, [flow], 2).slowest_s >= best.price.slowest_s


def test_the_order_is_that_whose_neighbors_talk_most() -> None:
    shape = Shape(Layout(pipeline=2, shard=2), 1)
    thin = TWO_LEAVES.with_rates(1.0, {"leaf": 0.25})
    data = Flow("shard", "ring", 2, 1, 100.0)
    assert choices(thin, shape, [Flow("pipeline", "chain", 2, 2, 1.0), data])[0].order == "data"
    assert choices(thin, shape, [STAGES, Flow("shard", "ring", 2, 1, 1.0)])[0].order == "pipeline"


def test_an_oversubscribed_uplink_costs_in_proportion() -> None:
    thin = TWO_LEAVES.with_rates(1.0, {"leaf": 0.25})
    cost = price(thin, ("a", "c", "b", "d"), [DATA], 1)
    # One edge of the ring leaves each leaf: 8 bytes over a quarter of two nodes' rate.
    assert cost.uplink_s == {"leaf": 8 / (0.25 * 2)}
    assert cost.nic_s == cost.bound_s == 8.0
    assert not cost.certified


def test_inside_a_scale_up_domain_nothing_goes_over_the_network() -> None:
    racks = Topology((Level("rack", scale_up=True),), dict.fromkeys("abcd", ("r",)), 1.0)
    assert price(racks, tuple("abcd"), [DATA], 1).nic_s == 0.0


def test_a_bad_allocation_is_named_with_its_cost() -> None:
    pods = Topology((Level("pod", share=0.5),), {f"n{k}": (f"pod{k % 4}",) for k in range(16)}, 100.0)
    flow = Flow("expert", "all_to_all", 4, 1, 400.0)
    shape = Shape(Layout(shard=4, expert=4), 1)
    good = verify(pods, ["n0", "n4", "n8", "n12"], shape, [flow])
    assert good.good
    assert good.lost_s == 0.0
    bad = verify(pods, ["n0", "n1", "n2", "n3"], shape, [flow])
    # One node of four in each pod: its 400 bytes over half the rate of the pod's four nodes, and over its own NIC.
    assert bad.best.price.nic_s == 4.0
    thin = verify(pods.with_rates(100.0, {"pod": 0.125}), ["n0", "n1", "n2", "n3"], shape, [flow])
    assert not thin.good
    assert thin.lost_s == pytest.approx(400 / (4 * 100 * 0.125) - 4.0)
    assert "4e+03 ms of a step are lost on the way (pod pod" in thin.sentence


def test_too_few_or_unknown_nodes_are_refused() -> None:
    shape = Shape(Layout(shard=4), 1)
    with pytest.raises(TopologyError, match="2 nodes were allocated, and the run's ranks need 4"):
        verify(TWO_LEAVES, ["a", "b", "b"], shape, [DATA])
    with pytest.raises(TopologyError, match="there is no node stranger"):
        verify(TWO_LEAVES, ["a", "b", "c", "stranger"], shape, [DATA])


def test_a_unit_that_does_not_divide_the_nodes_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        TopologyError, match="a unit of 3 nodes does not divide the run's 4: take one of 1, 2, 4"
    ):
        choices(TWO_LEAVES, Shape(Layout(shard=4), 1), [DATA], unit=3)


@given(blocks=st.integers(1, 4), stages=st.integers(1, 3), block=st.integers(1, 3))
def test_an_order_is_a_permutation_that_keeps_blocks_together(blocks: int, stages: int, block: int) -> None:
    seats = blocks * stages * block
    order = sequence(seats, stages, block, "pipeline")
    assert sorted(order) == list(range(seats))
    for place in range(0, seats, block):
        assert order[place : place + block] == list(range(order[place], order[place] + block))
    # The stages of a replica follow each other.
    assert [seat // (blocks * block) for seat in order[: stages * block : block]] == list(range(stages))

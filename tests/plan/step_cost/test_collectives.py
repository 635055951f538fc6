"""Collectives: bounded by bandwidth from below, monotone, free for a group of one, and sane at ten thousand ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.catalog import cluster
from phalanx.hardware.cluster import Cluster, FabricLevel, with_value
from phalanx_plan.step_cost.hardware_times import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    point_to_point_s,
    reduce_scatter_s,
)

Collective = Callable[[Cluster, Any, Any, Any], Any]
GROUPS: list[Collective] = [all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s]
CLUSTERS = {
    name: cluster(f"{name}:16384")
    for name in ("h100", "a100", "gb200-nvl72", "meta-h100-24k", "b300", "v100", "tpu-v5p", "tpu-v5e")
}
NAMES = st.sampled_from(sorted(CLUSTERS))
SIZES, STRIDES = (
    st.integers(1, 12).map(lambda power: 2**power),
    st.integers(0, 10).map(lambda power: 2**power),
)
BYTES = st.floats(1, 1e12)
COLLECTIVES = st.sampled_from(GROUPS)


def dispatch(where: Cluster, size: Any, stride: Any, tokens: Any) -> Any:
    return dispatch_s(where, size, stride, tokens, 7168.0, 8)


@given(COLLECTIVES | st.just(dispatch), NAMES, SIZES, STRIDES, BYTES, st.floats(1, 100))
def test_more_bytes_never_take_less_time(
    collective: Collective, name: str, size: int, stride: int, volume: float, factor: float
) -> None:
    where = CLUSTERS[name]
    assert collective(where, size, stride, factor * volume) >= collective(where, size, stride, volume) * (
        1 - 1e-12
    )


@given(COLLECTIVES | st.just(dispatch), NAMES, SIZES, STRIDES, BYTES, st.sampled_from(["domain", "fabric"]))
def test_twice_the_bandwidth_is_never_slower(
    collective: Collective, name: str, size: int, stride: int, volume: float, link: str
) -> None:
    where = CLUSTERS[name]
    faster = with_value(where, f"{link}.bytes_per_s", 2 * getattr(where, link).bytes_per_s.value)
    assert collective(faster, size, stride, volume) <= collective(where, size, stride, volume) * (1 + 1e-12)


@given(NAMES, SIZES.filter(lambda size: size > 1), STRIDES, BYTES)
def test_no_collective_beats_the_links_that_leave_an_accelerator(
    name: str, size: int, stride: int, volume: float
) -> None:
    where = CLUSTERS[name]
    rate = where.domain.bytes_per_s.value
    inner = min(size, max(1, where.domain.size // stride))
    leaving = volume * (size - 1) / size
    assert all_gather_s(where, size, stride, volume) >= leaving / rate
    assert reduce_scatter_s(where, size, stride, volume) >= leaving / rate
    assert all_to_all_s(where, size, stride, volume) >= leaving / rate
    assert all_reduce_s(where, size, stride, volume) >= leaving / rate
    network = where.fabric.bytes_per_s.value
    if inner < size:
        assert all_to_all_s(where, size, stride, volume) >= volume * (size - inner) / size / network
        outer = size // inner
        assert all_gather_s(where, size, stride, volume) >= volume * (outer - 1) / outer / inner / network * (
            1 - 1e-9
        )


@given(COLLECTIVES | st.just(dispatch), NAMES, STRIDES, BYTES)
def test_a_group_of_one_is_free(collective: Collective, name: str, stride: int, volume: float) -> None:
    assert collective(CLUSTERS[name], 1, stride, volume) == 0


@given(COLLECTIVES | st.just(dispatch), st.integers(1, 3).map(lambda power: 2**power), BYTES)
def test_a_group_within_one_domain_does_not_see_the_fabric(
    collective: Collective, size: int, volume: float
) -> None:
    where = CLUSTERS["h100"]
    slow = with_value(where, "fabric.bytes_per_s", 1e9)
    assert collective(slow, size, 1, volume) == collective(where, size, 1, volume)


@given(COLLECTIVES, NAMES, BYTES)
def test_arrays_broadcast_and_agree_with_scalars(collective: Collective, name: str, volume: float) -> None:
    where, sizes, strides = CLUSTERS[name], np.array([1, 2, 8, 64, 1024]), np.array([1, 8])[:, None]
    grid = collective(where, sizes, strides, volume)
    assert grid.shape == (2, 5)
    for row, stride in enumerate((1, 8)):
        for column, size in enumerate(sizes):
            assert grid[row, column] == collective(where, size, stride, volume)


@pytest.mark.parametrize("collective", [all_gather_s, reduce_scatter_s])
def test_large_tensors_approach_the_bandwidth_of_the_slower_link(collective: Collective) -> None:
    """One rank a node: the ring moves (n - 1)/n of the tensor over each adapter, at the share that transfers reach."""
    where, volume = CLUSTERS["h100"], 1e12
    expected = volume * 127 / 128 / (50e9 * 0.92)
    assert collective(where, 128, 8, volume) == pytest.approx(expected, rel=0.01)


def test_nodes_of_eight_use_eight_adapters() -> None:
    where, volume = CLUSTERS["h100"], 1e12
    assert all_gather_s(where, 128, 1, volume) < all_gather_s(where, 16, 8, volume) / 4


@pytest.mark.parametrize("collective", GROUPS[:3])
def test_small_tensors_at_ten_thousand_ranks_cost_milliseconds_not_seconds_or_microseconds(
    collective: Collective,
) -> None:
    """A ring of 8,192 ranks has 8,191 hops of microseconds; a tree some tens of microseconds a level."""
    seconds = collective(CLUSTERS["h100"], 8192, 1, 1e6)
    assert 5e-5 < seconds < 0.05
    assert collective(CLUSTERS["h100"], 1024, 8, 1e6) < 5e-4  # one rank a node: logarithmic


def test_latency_of_a_wide_tree_grows_by_levels_not_by_members() -> None:
    small, large = (all_reduce_s(CLUSTERS["h100"], size, 8, 1e3) for size in (64, 1024))
    assert small < large < 2.5 * small


def test_oversubscription_costs_the_all_to_all_what_it_takes_and_the_ring_next_to_nothing() -> None:
    meta = CLUSTERS["meta-h100-24k"]
    full = dataclasses.replace(
        meta,
        fabric=dataclasses.replace(
            meta.fabric, levels=tuple(dataclasses.replace(level, share=1.0) for level in meta.fabric.levels)
        ),
    )
    assert all_gather_s(meta, 2048, 8, 1e12) == pytest.approx(all_gather_s(full, 2048, 8, 1e12), rel=1e-6)
    assert all_to_all_s(meta, 2048, 8, 1e12) > 4 * all_to_all_s(full, 2048, 8, 1e12)
    assert point_to_point_s(meta, 4096, 1e9) > 6 * point_to_point_s(full, 4096, 1e9)


def test_a_switch_that_adds_halves_what_an_all_reduce_sends() -> None:
    where = CLUSTERS["h100"]
    adding = dataclasses.replace(where, fabric=dataclasses.replace(where.fabric, in_switch_reduction=True))
    assert all_reduce_s(adding, 512, 8, 1e11) == pytest.approx(
        all_reduce_s(where, 512, 8, 1e11) / 2, rel=0.05
    )


def test_a_wider_domain_is_faster_for_groups_that_it_holds() -> None:
    """36 ranks: within an NVL72 domain, against four nodes of eight and a half."""
    wide, narrow = (all_to_all_s(CLUSTERS[name], 64, 1, 1e9) for name in ("gb200-nvl72", "h100"))
    assert wide < narrow / 5


def test_measured_bandwidths_inside_a_node_are_met() -> None:
    """Bus rates of NCCL 2.29.2 at 512 MiB on eight GPUs (ai-dynamo/aiconfigurator), which the fits have seen in part."""
    volume = 2.0**29
    h100, b200 = CLUSTERS["h100"], cluster("b200:8")
    assert volume / all_gather_s(h100, 8, 1, volume) == pytest.approx(383e9, rel=0.1)
    assert volume / all_reduce_s(h100, 8, 1, volume) == pytest.approx(254e9, rel=0.1)
    assert volume / all_to_all_s(h100, 8, 1, volume) == pytest.approx(360e9, rel=0.1)
    assert volume / all_gather_s(b200, 8, 1, volume) == pytest.approx(705e9, rel=0.1)
    assert volume / all_reduce_s(b200, 8, 1, volume) == pytest.approx(402e9, rel=0.1)


def test_a_token_crosses_the_network_once_for_each_node_and_never_for_more_than_the_limit() -> None:
    where, tokens = CLUSTERS["h100"], 65_536
    free = dispatch_s(where, 64, 1, tokens, 7168, 8)
    limited = dispatch_s(where, 64, 1, tokens, 7168, 8, domain_limit=4)
    plain = all_to_all_s(where, 64, 1, tokens * 7168.0 * 8)
    assert limited < free < plain
    expected_nodes = 8 * (1 - (1 - 1 / 8) ** 8)
    assert free >= tokens * 7168 * expected_nodes * 7 / 8 / 50e9
    assert limited >= tokens * 7168 * 4 * 7 / 8 / 50e9


def test_one_expert_a_token_goes_to_one_place() -> None:
    """With one expert each token moves once, as in an all-to-all of the tokens themselves."""
    where = CLUSTERS["h100"]
    assert dispatch_s(where, 512, 8, 1e6, 1000, 1) == pytest.approx(
        all_to_all_s(where, 512, 8, 1e9), rel=0.01
    )


def test_stages_within_a_domain_send_over_its_links_and_others_over_the_network() -> None:
    where = CLUSTERS["h100"]
    assert point_to_point_s(where, 4, 1e9) < point_to_point_s(where, 8, 1e9) / 5
    assert (
        point_to_point_s(where, 4, 1e9, size=4) > point_to_point_s(where, 4, 1e9) * 5
    )  # the second hop leaves the node
    assert point_to_point_s(where, 8, 1e9) == pytest.approx(1e9 / (50e9 * 0.92), rel=0.01)


def test_a_ring_along_one_axis_of_a_torus_has_that_axis_links() -> None:
    """Two of six links on a v5p (16 of 8,960 chips in a row), all six for a block of 4,096."""
    where = CLUSTERS["tpu-v5p"]
    assert all_gather_s(where, 16, 1, 1e12) == pytest.approx(1e12 * 15 / 16 / (540e9 / 3 * 0.9), rel=0.01)
    assert all_gather_s(where, 4096, 1, 1e12) == pytest.approx(1e12 / (540e9 * 0.9), rel=0.05)


def test_levels_are_chosen_by_the_reach_of_the_group() -> None:
    where = CLUSTERS["h100"]
    levels = tuple(
        FabricLevel(level.name, level.reach, 1.0, latency)
        for level, latency in zip(where.fabric.levels, (1e-6, 1e-4, 1e-2), strict=True)
    )
    steep = dataclasses.replace(where, fabric=dataclasses.replace(where.fabric, levels=levels))
    near, far = point_to_point_s(steep, 64, 1.0), point_to_point_s(steep, 4096, 1.0)
    assert far - near == pytest.approx(99e-6)

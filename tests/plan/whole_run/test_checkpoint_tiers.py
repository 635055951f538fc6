"""Stall, drain and restore of each tier from bytes over bandwidths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_clusters import h100s, with_rates
from phalanx.hardware.catalog import cluster, systems
from phalanx_plan.whole_run.recovery import TierError, host_bytes_per_node, tiers

STATE_1T_BYTES = 14e12


def test_a_trillion_parameters_on_100k_gpus_by_hand() -> None:
    places = tiers(h100s(100_000), STATE_1T_BYTES)
    own_bytes = 140e6
    assert places["host"].stall_s == pytest.approx(own_bytes / 55e9)
    assert places["peer"].drain_s == pytest.approx(own_bytes / 50e9)
    assert places["peer"].restore_s == pytest.approx(own_bytes / 50e9 + own_bytes / 55e9)
    assert places["nvme"].drain_s == pytest.approx(8 * own_bytes / 10e9)
    assert places["storage"].drain_s == pytest.approx(14e12 / 2e12)


def test_all_tiers_stall_for_the_same_copy_to_host_memory() -> None:
    assert len({tier.stall_s for tier in tiers(h100s(1024), STATE_1T_BYTES).values()}) == 1


@given(st.floats(1e9, 1e15), st.integers(1, 10**5), st.floats(1.0, 10.0))
def test_twice_the_bandwidth_is_never_slower(state_bytes: float, accelerators: int, times: float) -> None:
    cluster = h100s(100_000)
    now = tiers(cluster, state_bytes, accelerators)
    for change in ({"storage": times}, {"fabric": times}, {"host": times}):
        then = tiers(with_rates(cluster, **change), state_bytes, accelerators)
        for name, tier in now.items():
            assert then[name].stall_s <= tier.stall_s
            assert then[name].drain_s <= tier.drain_s
            assert then[name].restore_s <= tier.restore_s


@given(st.floats(1e9, 1e15), st.floats(0, 1))
def test_what_computation_hides_of_the_copy_moves_from_the_stall_to_the_drain(
    state_bytes: float, overlap: float
) -> None:
    plain, hidden = tiers(h100s(64), state_bytes), tiers(h100s(64), state_bytes, snapshot_overlap=overlap)
    for name in plain:
        assert hidden[name].stall_s + hidden[name].drain_s == pytest.approx(
            plain[name].stall_s + plain[name].drain_s
        )


def test_a_state_that_the_hosts_cannot_hold_is_marked_as_not_fitting() -> None:
    # Two nodes of 2 TB hold two copies of 1.5 TB each, but not two of one's own and two of a peer's.
    places = tiers(h100s(16), 1.5e12)
    assert places["host"].fits
    assert not places["peer"].fits
    assert places["peer"].host_bytes_per_node == 4 * 1.5e12 / 2


def test_what_is_staged_for_the_store_takes_memory_beside_what_peers_hold() -> None:
    """Eight H100s with 48 GB of state each: two copies of a node's own, two of a peer's, one on its way."""
    places = tiers(h100s(16), 16 * 48e9)
    assert host_bytes_per_node(places["peer"], places["storage"]) == 5 * 8 * 48e9
    assert host_bytes_per_node(places["storage"], places["storage"]) == 2 * 8 * 48e9


def test_the_store_of_llama_3_takes_405b_parameters_in_seconds() -> None:
    """Tectonic sustains 2 TB/s (arXiv:2407.21783); its checkpoint is 5.5 TB."""
    assert tiers(h100s(16_384), 5.5e12)["storage"].drain_s == pytest.approx(2.75)


def test_impossible_sizes_are_refused_by_name() -> None:
    with pytest.raises(TierError, match="checkpoint_bytes"):
        tiers(h100s(8), -1)
    with pytest.raises(TierError, match="snapshot_overlap"):
        tiers(h100s(8), 1, snapshot_overlap=2)


@pytest.mark.parametrize("key", systems())
def test_every_system_of_the_catalog_can_save_in_every_tier(key: str) -> None:
    places = tiers(cluster(f"{key}:4"), 1e9)
    assert all(math.isfinite(tier.drain_s) and math.isfinite(tier.restore_s) for tier in places.values())

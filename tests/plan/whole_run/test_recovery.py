"""Recovery times by method against the totals that others published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_clusters import h100s
from phalanx.observe.ledger import Bucket
from phalanx_plan.whole_run.recovery import (
    TIER_OF,
    RecoveryError,
    RecoveryMethod,
    fleet_share,
    recovery_phases,
    tiers,
)

METHODS: tuple[RecoveryMethod, ...] = ("spare", "shrink", "restart")
PLACES = tiers(h100s(8_192), 5.5e12)


def seconds(method: RecoveryMethod, level: str) -> float:
    phases = recovery_phases(method, PLACES[TIER_OF[method]], level)  # type: ignore[arg-type]
    return sum(phase.duration_s for phase in phases)


@pytest.mark.parametrize("method", METHODS)
def test_every_phase_is_a_bucket_of_the_goodput_ledger_and_has_a_source(method: RecoveryMethod) -> None:
    for phase in recovery_phases(method, PLACES["peer"]):
        assert phase.name in {bucket.value for bucket in Bucket}
        assert phase.source


@pytest.mark.parametrize("method", METHODS)
def test_low_typical_and_high_are_in_that_order(method: RecoveryMethod) -> None:
    assert seconds(method, "low") < seconds(method, "typical") < seconds(method, "high")


def test_a_restart_takes_the_minutes_that_trainmover_measured_at_8192_gpus() -> None:
    """6.47 minutes in all, 1.56 of them reading the checkpoint, which depends on the store."""
    assert seconds("restart", "typical") - PLACES["storage"].restore_s == pytest.approx(
        (6.47 - 1.56) * 60, rel=0.25
    )


def test_a_spare_recovers_within_the_published_range_of_twenty_seconds_to_three_minutes() -> None:
    assert 10 < seconds("spare", "low") < 25
    assert seconds("spare", "high") < 185


def test_the_state_is_read_back_before_the_first_step() -> None:
    names = [phase.name for phase in recovery_phases("spare", PLACES["peer"])]
    assert names[-2:] == ["start.restore", "start.warmup"]


@given(st.floats(0, 1000), st.integers(1, 1000), st.integers(1, 10_000))
def test_only_a_shrinking_fleet_lacks_throughput_and_never_all_of_it(
    away: float, replicas: int, nodes: int
) -> None:
    assert fleet_share("spare", away, nodes, replicas) == 1
    assert 0 <= fleet_share("shrink", away, nodes, replicas) <= 1


@pytest.mark.parametrize(("replicas", "nodes"), [(50, 1000), (1000, 1000), (4000, 1000)])
def test_the_share_of_whole_replicas_agrees_with_drawing_the_lost_nodes(replicas: int, nodes: int) -> None:
    random = np.random.default_rng(0)
    mean_away, draws = 20.0, 2000
    intact = 0
    for _ in range(draws):
        away = random.integers(nodes, size=random.poisson(mean_away))
        alive = np.ones(nodes, bool)
        alive[away] = False
        # Replicas of equal size: several nodes each, or several on each node.
        intact += alive.reshape(min(replicas, nodes), -1).all(axis=1).sum()
    assert intact / draws / min(replicas, nodes) == pytest.approx(
        fleet_share("shrink", mean_away, nodes, replicas), rel=0.005
    )


def test_an_unknown_method_is_refused_with_those_there_are() -> None:
    with pytest.raises(RecoveryError, match="spare, shrink, restart"):
        recovery_phases("hope", PLACES["peer"])  # type: ignore[arg-type]

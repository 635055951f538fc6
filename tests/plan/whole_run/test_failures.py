"""Failure rates against the fleets that published them, and spares against queueing theory and ByteRobust."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_clusters import h100s
from phalanx_plan.whole_run.failures import (
    CLASSES,
    DAY_S,
    FLEETS,
    FailureModelError,
    classes_at_node_rate,
    failures_per_s,
    mtti_s,
    nodes_in_repair,
    spares_needed,
)


def per_1000_node_days(per_s: float, nodes: float) -> float:
    return per_s * DAY_S * 1000 / nodes


def test_the_typical_rate_gives_back_the_419_interruptions_of_llama_3() -> None:
    assert failures_per_s(h100s(16_384)) * 54 * DAY_S == pytest.approx(419)


@pytest.mark.parametrize(("level", "rate"), [("low", 2.34), ("typical", 3.79), ("high", 6.50)])
def test_the_levels_are_the_three_published_rates_of_an_eight_gpu_node(level: str, rate: float) -> None:
    node_rate = per_1000_node_days(failures_per_s(h100s(8_000), level=level), 1_000)  # type: ignore[arg-type]
    assert node_rate == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_meta_s_projections_for_rsc_1_are_reproduced(gpus: int, hours: float) -> None:
    high = mtti_s(failures_per_s(h100s(gpus), level="high"))
    assert high / 3600 == pytest.approx(hours, rel=0.03)


def test_every_class_states_a_range_around_its_typical_rate_and_a_source() -> None:
    for failure_class in CLASSES:
        assert 0 < failure_class.low < failure_class.typical < failure_class.high
        assert "arXiv" in failure_class.source


def test_failures_that_cost_a_node_and_those_that_do_not_are_all_failures() -> None:
    cluster = h100s(1024)
    parts = failures_per_s(cluster, takes_node=True) + failures_per_s(cluster, takes_node=False)
    assert parts == pytest.approx(failures_per_s(cluster))


@pytest.mark.parametrize("rate", [rate for rate, _ in FLEETS.values()])
def test_a_user_s_own_rate_of_nodes_replaces_the_published_ones(rate: float) -> None:
    fleet_rate = failures_per_s(h100s(8_000), classes=classes_at_node_rate(rate))
    assert per_1000_node_days(fleet_rate, 1_000) == pytest.approx(rate)


@given(st.integers(8, 10**6), st.integers(1, 8))
def test_more_accelerators_never_fail_less_often(accelerators: int, times: int) -> None:
    cluster = h100s(10**7)
    assert failures_per_s(cluster, accelerators * times) == pytest.approx(
        times * failures_per_s(cluster, accelerators)
    )


def test_nothing_that_fails_means_an_infinite_time_to_interruption() -> None:
    assert math.isinf(mtti_s(0.0))


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_one_rate_reproduces_all_four_pools_of_standbys_of_byterobust(machines: int, standbys: int) -> None:
    """ByteRobust (arXiv:2509.16293), Table 7: 99th percentile at 2,048 to 16,384 GPUs, 16 a machine."""
    away_per_machine = 0.0012
    assert spares_needed(machines * away_per_machine, 1.0, 0.99) == standbys


@given(st.floats(0.01, 200), st.sampled_from([0.5, 0.9, 0.99, 0.999]))
def test_the_spares_are_the_smallest_number_that_suffices(mean: float, confidence: float) -> None:
    spares = spares_needed(mean, 1.0, confidence)

    def enough(count: int) -> float:
        return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))

    assert enough(spares) >= confidence - 1e-9
    assert spares == 0 or enough(spares - 1) < confidence + 1e-9


def test_so_many_failures_that_nobody_can_repair_them_are_counted_at_once() -> None:
    below, above = (spares_needed(mean, 1.0, 0.99) for mean in (999_999.0, 1_000_001.0))
    assert 0 < above - below <= 4
    assert spares_needed(1e15, 1.0, 0.99) == pytest.approx(1e15)
    assert spares_needed(1e15, 1.0, 0.0) >= 0


def test_nodes_in_repair_follow_poisson_even_when_every_repair_takes_equally_long() -> None:
    random = np.random.default_rng(0)
    nodes, rate_per_s, repair_s, moments = 1000, 4e-6, 1000.0, 200_000
    away = random.binomial(nodes, 1 - math.exp(-rate_per_s * repair_s), size=moments)
    spares = spares_needed(nodes * rate_per_s, repair_s, 0.99)
    assert nodes_in_repair(nodes * rate_per_s, repair_s) == pytest.approx(away.mean(), rel=0.01)
    assert (away <= spares).mean() >= 0.99 > (away <= spares - 1).mean()


def test_impossible_rates_are_refused_with_what_would_be_possible() -> None:
    with pytest.raises(FailureModelError, match=r"Llama 3 405B 3\.79"):
        classes_at_node_rate(0)
    with pytest.raises(FailureModelError, match=r"0\.99 is usual"):
        spares_needed(1.0, 1.0, 1.0)
    with pytest.raises(FailureModelError, match="accelerators"):
        failures_per_s(h100s(8), 0)

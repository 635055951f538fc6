"""Queues in closed form against a simulation of every arrival."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from phalanx_plan.serving.fleet import erlang_c, mean_wait_s, most_running, wait_percentile_s


def waits(rate: float, services: np.ndarray, servers: int) -> np.ndarray:
    """Waiting times of arrivals that go to the server that is free first."""
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, len(services)))
    free = [0.0] * servers
    waits_s = np.empty(len(services))
    for number, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
        begin = max(arrival, heapq.heappop(free))
        waits_s[number] = begin - arrival
        heapq.heappush(free, begin + service)
    return waits_s


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (3, 0.8), (8, 0.85)])
def test_exponential_service_waits_by_erlangs_formula(servers: int, load: float) -> None:
    services = np.random.default_rng(2).exponential(1.0, 200_000)
    waits_s = waits(load * servers, services, servers)
    assert mean_wait_s(load * servers, 1.0, 1.0, servers) == pytest.approx(waits_s.mean(), rel=0.08)
    assert erlang_c(servers, load * servers) == pytest.approx((waits_s > 0).mean(), rel=0.05)
    ninety = wait_percentile_s(load * servers, 1.0, 1.0, servers, 0.95)
    assert ninety == pytest.approx(np.quantile(waits_s, 0.95), rel=0.1)


@pytest.mark.parametrize("servers", [1, 4])
def test_equal_service_waits_half_as_long(servers: int) -> None:
    waits_s = waits(0.8 * servers, np.ones(200_000), servers)
    assert mean_wait_s(0.8 * servers, 1.0, 0.0, servers) == pytest.approx(waits_s.mean(), rel=0.12)


def test_an_overloaded_queue_waits_without_bound() -> None:
    assert math.isinf(mean_wait_s(2.1, 1.0, 1.0, 2))
    assert math.isinf(wait_percentile_s(2.0, 1.0, 1.0, 2, 0.99))


def test_hardly_anything_waits_for_an_idle_queue() -> None:
    assert wait_percentile_s(0.001, 1.0, 1.0, 4, 0.99) == 0.0


def test_a_poisson_number_stays_below_its_percentile() -> None:
    drawn = np.random.default_rng(3).poisson(400, 100_000)
    assert most_running(400, 0.99) == pytest.approx(np.quantile(drawn, 0.99), rel=0.01)

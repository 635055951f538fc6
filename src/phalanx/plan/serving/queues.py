"""Waiting times in closed form: M/G/k by Erlang's formula and the correction for the service times' spread.

Erlang C is exact for exponential service; for others the mean wait is scaled by (1 + c^2) / 2, exact for one server
(Pollaczek-Khinchine) and the usual approximation for more (Lee and Longton, 1959), and the tail is taken as exponential.
Running decodes see no queue but each other: their number is Poisson (M/G/infinity).
"""

from __future__ import annotations

import math


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits; ``load`` is arrivals times mean service (below ``servers``, else it is 1)."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def mean_wait_s(rate: float, service_s: float, spread: float, servers: int) -> float:
    """Mean seconds before service begins; infinite if the servers are overloaded."""
    spare = servers / service_s - rate
    if spare <= 0:
        return math.inf
    return erlang_c(servers, rate * service_s) / spare * (1 + spread**2) / 2


def wait_percentile_s(rate: float, service_s: float, spread: float, servers: int, share: float) -> float:
    """Seconds that ``share`` of the arrivals wait at most."""
    waits = erlang_c(servers, rate * service_s)
    mean = mean_wait_s(rate, service_s, spread, servers)
    if not math.isfinite(mean):
        return math.inf
    return mean / waits * math.log(waits / (1 - share)) if waits > 1 - share else 0.0


def most_running(mean: float, share: float) -> float:
    """Requests that run at once in ``share`` of the time, of a Poisson number with this ``mean`` (normal approximation)."""
    return mean + _normal_quantile(share) * math.sqrt(mean)


def _normal_quantile(share: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2

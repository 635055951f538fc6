"""Worker fleets that serve a traffic on a cluster within its objectives, their cost, and the limits of the rejected ones.

Every division of prefill and of decode, and workers that do both, are priced. Each gets the fewest workers that carry the rate
within the objectives (or, without a rate, as many as fit). Prefill is an M/G/k queue. Decode's running requests are Poisson,
so that a step's time at their percentile is the time of a token. If one worker does both, decode gets the time that
prefill leaves, and a chunk of a prompt may come between two tokens. Prefill and decode apart are in the proportion
``in (1 - hit) / R_p : out / R_d`` of the rates of one worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from phalanx_plan.serving import step_cost
from phalanx_plan.serving.workers import (
    DemandError,
    PlannedWorker,
    RequestTraffic,
    Service,
    largest,
    shortfalls,
    workers_of,
)

# Waiting times in closed form: M/G/k by Erlang's formula and the correction for the service times' spread.
#
# Erlang C is exact for exponential service. For others the mean wait is scaled by (1 + c^2) / 2, exact for one server
# (Pollaczek-Khinchine) and the usual approximation for more (Lee and Longton, 1959); the tail is assumed to be exponential.
# Running decodes queue only behind each other: their number is Poisson (M/G/infinity).


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that an arrival waits for one of ``servers`` (Erlang C); 1 if overloaded.

    ``load`` is arrivals times mean service time.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def mean_wait_s(rate: float, service_s: float, spread: float, servers: int) -> float:
    """Return the mean seconds before service begins, by Erlang C and the Allen-Cunneen factor; infinite if
    overloaded.

    ``rate`` is arrivals a second, ``spread`` the coefficient of variation of the service time.
    """
    spare = servers / service_s - rate
    if spare <= 0:
        return math.inf
    return erlang_c(servers, rate * service_s) / spare * (1 + spread**2) / 2


def wait_percentile_s(rate: float, service_s: float, spread: float, servers: int, share: float) -> float:
    """Return the seconds of waiting that the share ``share`` of arrivals does not exceed, with an exponential tail.

    0 if at most the share ``1 - share`` waits at all, infinite if the servers are overloaded.
    """
    waits = erlang_c(servers, rate * service_s)
    mean = mean_wait_s(rate, service_s, spread, servers)
    if not math.isfinite(mean):
        return math.inf
    return mean / waits * math.log(waits / (1 - share)) if waits > 1 - share else 0.0


def most_running(mean: float, share: float) -> float:
    """Return the number of running requests that is not exceeded in ``share`` of the time (normal approximation of Poisson)."""
    return mean + _normal_quantile(share) * math.sqrt(mean)


def _normal_quantile(share: float) -> float:
    """Return the value below which ``share`` of a standard normal distribution lies, by bisection."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


_MIXED_LOAD = 0.9
"""The largest share of a worker's time for prefill if it also decodes."""
_OF_A_ROLE = 16
"""Number of the best workers of one role that are tried with those of the other role."""
_SHOWN = 8
Roles = Literal["apart", "together"]


@dataclass(frozen=True)
class ServingFleet:
    """A fleet of workers with its rates and times; ``killed`` is the limit that it violates, empty if none."""

    roles: Roles
    prefill: step_cost.Division
    decode: step_cost.Division
    prefill_workers: int
    decode_workers: int
    accelerators: int
    rate: float
    """Requests a second within the objectives."""
    ttft_s: tuple[float, float]
    """Median, and at the objectives' percentile."""
    tpot_s: tuple[float, float]
    running: float
    """Mean number of requests that a decode worker runs."""
    dollars_per_million: float
    """Dollars for a million tokens of answers."""
    joules_per_token: float
    killed: str = ""
    parts_s: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds of a decode step by part."""


def plan_service(service: Service) -> tuple[list[ServingFleet], list[ServingFleet]]:
    """Return the fleets that meet the objectives, best first, and the others, nearest first.

    Workers with both roles are tried, and pairs with one role each. Without a rate in the traffic, the highest
    goodput is best. Only the first ``_SHOWN`` fleets have ``parts_s``. Raises ``DemandError`` if no worker holds a
    single request.
    """
    workers = list(workers_of(service))
    if not workers:
        least = min(shortfalls(service))
        raise DemandError(
            f"--cluster {service.cluster.key}: no division of the model holds a request of "
            f"{service.traffic.prompt + service.traffic.text:,.0f} tokens in {service.format}; the nearest lacks {least / 1e9:.1f} GB "
            f"on a rank: more accelerators of a worker, --format fp8, or shorter --traffic; or stream the weights: {_streamed(service)}"
        )
    answers = [_together(service, worker) for worker in workers]
    answers += [
        _apart(service, first, second)
        for first in _best_prefill(service, workers)
        for second in _best_decode(service, workers)
    ]
    worth = _worth if math.isfinite(service.traffic.rate) else _goodput
    good = sorted((each for each in answers if not each.killed), key=worth)
    bad = sorted((each for each in answers if each.killed), key=lambda each: _distance(service, each))
    return [_with_parts(service, each) for each in good[:_SHOWN]] + good[_SHOWN:], bad


def _streamed(service: Service) -> str:
    """Describe the upper bound of tokens a second, with 1 and with 64 rows, if weights are read from host memory for each pass."""
    cluster = service.cluster
    rate = cluster.accelerator.host_bytes_per_s.value * cluster.accelerators
    bounds = []
    for rows in (1, 64):
        size = step_cost.streamed_bytes(service.model, step_cost.FORMAT_BYTES[service.format], rows)
        bounds.append(f"{step_cost.tokens_per_s(rows, size, rate):,.3g} tokens/s with {rows} rows")
    return f"from host memory at most {' and '.join(bounds)}"


def _best_prefill(service: Service, workers: list[PlannedWorker]) -> list[PlannedWorker]:
    """Return the ``_OF_A_ROLE`` workers with the highest prefill rate per accelerator; those that meet the TTFT alone come first."""
    late = service.objectives.ttft_s
    return sorted(
        workers,
        key=lambda worker: (worker.prompt_s > late, -worker.prefill_tokens_per_s / worker.division.ranks),
    )[:_OF_A_ROLE]


def _best_decode(service: Service, workers: list[PlannedWorker]) -> list[PlannedWorker]:
    """Return the ``_OF_A_ROLE`` workers with the highest decode rate per accelerator, at their mean load within the TPOT.
    Workers that cannot keep the TPOT are last, and not left out.
    """

    def each(worker: PlannedWorker) -> float:
        """Return the negative tokens a second of each accelerator at mean load."""
        mean = _mean_running(worker.running, service.objectives.percentile)
        return -mean / _token_s(service, worker, max(mean, 1.0)) / worker.division.ranks

    return sorted(workers, key=each)[:_OF_A_ROLE]


def _with_parts(service: Service, answer: ServingFleet) -> ServingFleet:
    """Return the fleet with the seconds of each part of its decode step."""
    division = answer.decode
    rows = max(1.0, answer.running / division.data / division.pipeline)
    step = step_cost.ServingStep(
        service.model, service.cluster, division, service.format, rows, service.traffic.context_tokens
    )
    return replace(answer, parts_s=step_cost.step_parts(step))


def nearest(service: Service, bad: list[ServingFleet]) -> str:
    """Describe the first fleet of ``bad``, its times beside the objectives, and what to relax."""
    best, objectives = bad[0], service.objectives
    return (
        f"no fleet on {service.cluster.key} keeps the objectives: the nearest ({describe(best)}) fails because {best.killed}; it has "
        f"TTFT {best.ttft_s[1] * 1e3:.4g} ms (objective {objectives.ttft_s * 1e3:.4g}) and TPOT {best.tpot_s[1] * 1e3:.4g} ms (objective "
        f"{objectives.tpot_s * 1e3:.4g}) at {best.rate:.4g} requests/s: relax --slo, lower rate in --traffic, or give --cluster more"
    )


def describe(answer: ServingFleet) -> str:
    """Describe the workers in a few words."""
    if answer.roles == "together":
        return f"{answer.decode_workers} x ({answer.decode}) for both"
    return f"{answer.prefill_workers} x ({answer.prefill}) prefill, {answer.decode_workers} x ({answer.decode}) decode"


def split(traffic: RequestTraffic, prefill_rate: float, decode_rate: float) -> float:
    """Return the prefill workers for each decode worker, by the tokens a second of one of each."""
    return (traffic.new / prefill_rate) / (traffic.text / decode_rate)


def _mean_running(most: float, share: float) -> float:
    """Return the mean of a Poisson number that stays below ``most`` in this ``share`` of the time."""
    return largest(lambda mean: most_running(mean, share), most, max(most, 1.0)) if most >= 1 else 0.0


def _apart(service: Service, first: PlannedWorker, second: PlannedWorker) -> ServingFleet:
    """Return the best fleet in which workers ``first`` prefill and workers ``second`` decode.

    A finite rate gets the fewest workers that carry it; else all accelerators are used. ``killed`` has the reason if
    it cannot.
    """
    traffic, goal = service.traffic, service.objectives
    total = service.cluster.accelerators
    sizes = first.division.ranks, second.division.ranks
    mean = _mean_running(second.running, goal.percentile)
    each_s = _token_s(service, second, max(mean, 1.0)) * traffic.text
    decode_rate = mean / each_s
    prefill_rate = first.prefill_tokens_per_s / traffic.new
    fleet_of = partial(_answer, service, "apart", first, second)
    if sum(sizes) > total:
        return fleet_of((1, 1), 0.0, f"{sum(sizes)} accelerators are needed")
    if decode_rate == 0:
        return fleet_of((1, 1), 0.0, "a token takes longer than tpot, alone")
    if math.isfinite(traffic.rate):
        servers = _fewest_servers(service, first, traffic.rate, total // sizes[0] + 1)
        count = servers, math.ceil(traffic.rate / decode_rate)
        killed = ""
        if servers * sizes[0] + count[1] * sizes[1] > total:
            killed = f"{servers * sizes[0] + count[1] * sizes[1]:,} accelerators are needed"
            count = _shares(total, sizes, prefill_rate, decode_rate)
        rate = min(traffic.rate, count[1] * decode_rate, _most_rate(service, first, count[0]))
        return fleet_of(count, rate, killed)
    count = _shares(total, sizes, prefill_rate, decode_rate)
    rate = min(_most_rate(service, first, count[0]), count[1] * decode_rate)
    return fleet_of(count, rate, "")


def _shares(total: int, sizes: tuple[int, int], prefill_rate: float, decode_rate: float) -> tuple[int, int]:
    """Return the (prefill, decode) workers of ``sizes`` ranks with the highest rate together on ``total``
    accelerators, at least one each.
    """
    ideal = total / (sizes[0] / prefill_rate + sizes[1] / decode_rate) / prefill_rate
    options = {min(max(1, number), (total - sizes[1]) // sizes[0]) for number in (int(ideal), int(ideal) + 1)}
    counts = [(number, (total - number * sizes[0]) // sizes[1]) for number in options]
    return max(counts, key=lambda count: min(count[0] * prefill_rate, count[1] * decode_rate))


def _together(service: Service, worker: PlannedWorker) -> ServingFleet:
    """Return the fleet in which each worker prefills and decodes; prefill slows decode by its share of the time.

    A finite rate gets as many workers as it needs, else all accelerators are used. ``killed`` has the reason if it
    misses the objectives.
    """
    traffic, goal = service.traffic, service.objectives
    total, size = service.cluster.accelerators, worker.division.ranks
    most = total // size

    def rate_of(running: float) -> float:
        """Requests a second with ``running`` requests: each needs its prefill and its share of decode's steps."""
        return 1 / (
            _token_s(service, worker, running) * traffic.text / running
            + traffic.new / worker.prefill_tokens_per_s
        )

    def stretched(running: float) -> float:
        """Return the seconds of a token, stretched by the share of time that prefill takes, at most ``_MIXED_LOAD``."""
        prefill = min(rate_of(running) * traffic.new / worker.prefill_tokens_per_s, _MIXED_LOAD)
        return _token_s(service, worker, running) / (1 - prefill)

    most_running_at_once = largest(stretched, goal.tpot_s, worker.running) if worker.running >= 1 else 0.0
    mean = _mean_running(most_running_at_once, goal.percentile)
    fleet_of = partial(_answer, service, "together", worker, worker)
    if mean == 0:
        return fleet_of((most, most), 0.0, "a token takes longer than tpot beside prefill")
    each = rate_of(max(mean, 1.0))
    if not math.isfinite(traffic.rate):
        return fleet_of((most, most), most * each, "")
    count = math.ceil(traffic.rate / each)
    killed = f"{count * size:,} accelerators are needed" if count > most else ""
    count = min(count, most)
    return fleet_of((count, count), min(traffic.rate, count * each), killed)


def _token_s(service: Service, worker: PlannedWorker, running: float) -> float:
    """Seconds of a token of each running request."""
    return worker.step_s(running) / (1 + service.traffic.accept)


def _ttft_s(service: Service, worker: PlannedWorker, rate: float, servers: int, share: float) -> float:
    """Seconds until a prompt is computed, at the quantile ``share``: the wait for a group, and the prompt's own prefill.

    The first decode step and the transfer of pages are not included.
    """
    groups = servers * worker.division.data
    busy = service.traffic.new / (worker.prefill_tokens_per_s / worker.division.data)
    return wait_percentile_s(rate, busy, service.traffic.spread, groups, share) + worker.prompt_s


def _most_rate(service: Service, worker: PlannedWorker, servers: int) -> float:
    """Return the most requests a second at which ``servers`` prefill workers keep the time to first token; 0 if they never do."""
    goal = service.objectives
    capacity = servers * worker.prefill_tokens_per_s / service.traffic.new
    return capacity * _most_share(
        lambda load: _ttft_s(service, worker, load * capacity, servers, goal.percentile) <= goal.ttft_s
    )


def _most_share(holds: Callable[[float], bool]) -> float:
    """Return the largest share of load, up to 0.98, for which ``holds``, by bisection; 0 if that is not above 1e-5."""
    low, high = 0.0, 0.98
    if holds(high):
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low > 1e-5 else 0.0


def _fewest_servers(service: Service, worker: PlannedWorker, rate: float, most: int) -> int:
    """Return the fewest prefill workers that keep the time to first token at ``rate`` requests a second.

    Tries those that keep up with the rate, and up to 64 more, at most ``most`` in all. If none does, returns the fewest
    that keep up, which may be more than ``most``.
    """
    least = max(1, math.ceil(rate * service.traffic.new / worker.prefill_tokens_per_s / 0.98))
    for servers in range(least, min(most, least + 64) + 1):
        if (
            _ttft_s(service, worker, rate, servers, service.objectives.percentile)
            <= service.objectives.ttft_s
        ):
            return servers
    return least


def _answer(
    service: Service,
    roles: Roles,
    first: PlannedWorker,
    second: PlannedWorker,
    count: tuple[int, int],
    rate: float,
    killed: str,
) -> ServingFleet:
    """Return the fleet of ``count`` (prefill, decode) workers at ``rate`` with its times, cost and energy.

    If together, the same workers do both, and both counts are their number. Times are (median, at the objectives' percentile). TTFT
    includes a median TPOT, and if apart the transfer of a layer's pages.

    An empty ``killed`` is set if at that percentile TTFT misses its objective, else if TPOT does by over 2 %. Dollars are per million
    tokens of answers, joules per token.
    """
    traffic, goal = service.traffic, service.objectives
    decoding, prefilling = count[1], count[0]
    # Decode beside prefill takes its share of the time from it.
    stretch = 1.0
    if roles == "together":
        stretch = 1 / (1 - min(rate / decoding * traffic.new / first.prefill_tokens_per_s, _MIXED_LOAD))
    running = _running(service, second, rate / decoding, stretch)
    tpot = tuple(
        _token_s(service, second, max(1.0, most_running(running, share))) * stretch
        for share in (0.5, goal.percentile)
    )
    ttft = tuple(
        _ttft_s(service, first, rate * stretch * 0.999, prefilling, share) + tpot[0]
        for share in (0.5, goal.percentile)
    )
    if (
        roles == "apart"
    ):  # the pages of all layers but the last are sent while the following layers are computed
        pages = step_cost.token_bytes(service.model) * traffic.prompt / service.model.layers
        link = service.cluster.fabric.bytes_per_s.value or service.cluster.domain.bytes_per_s.value
        ttft = tuple(seconds + pages / max(link, 1.0) for seconds in ttft)
    if not killed and ttft[1] > goal.ttft_s:
        killed = f"the first token takes {ttft[1] * 1e3:,.0f} ms"
    if not killed and tpot[1] > goal.tpot_s * 1.02:
        killed = f"a token takes {tpot[1] * 1e3:,.1f} ms"
    used = decoding * second.division.ranks + (prefilling * first.division.ranks if roles == "apart" else 0)
    cluster = service.cluster
    tokens = max(rate * traffic.text, 1e-12)
    watts = (
        cluster.accelerator.power_w.value + cluster.node_power_w.value / cluster.per_node
    ) * cluster.pue.value
    return ServingFleet(
        roles,
        first.division,
        second.division,
        prefilling,
        decoding,
        used,
        rate,
        (ttft[0], ttft[1]),
        (tpot[0], tpot[1]),
        running,
        used * cluster.accelerator.price_per_hour.value / 3600 / tokens * 1e6,
        used * watts / tokens,
        killed,
    )


def _running(service: Service, worker: PlannedWorker, rate: float, stretch: float) -> float:
    """Mean running requests of a worker: the fixed point of Little's law with a step that grows with it, at most its
    room.

    ``stretch`` is the factor by which the worker's own prefill slows its decode.
    """
    running = 1.0
    for _ in range(40):
        following = min(
            rate * service.traffic.text * _token_s(service, worker, max(running, 1.0)) * stretch,
            max(worker.running, 1.0),
        )
        if abs(following - running) < 1e-3 * max(running, 1.0):
            break
        running = following
    return running


def _worth(answer: ServingFleet) -> tuple[float, float]:
    """Return the sort key of fleets that meet the objectives: cost of a million tokens, then accelerators."""
    return answer.dollars_per_million, answer.accelerators


def _goodput(answer: ServingFleet) -> tuple[float, float]:
    """Return the sort key by the highest rate, then the fewest accelerators."""
    return -answer.rate, answer.accelerators


def _distance(service: Service, answer: ServingFleet) -> float:
    """Return how far a fleet is from the objectives: ten times the missing share of the rate, and the excess of both times."""
    goal = service.objectives
    short = 0.0 if not math.isfinite(service.traffic.rate) else 1 - answer.rate / service.traffic.rate
    late = max(0.0, answer.ttft_s[1] / goal.ttft_s - 1) + max(0.0, answer.tpot_s[1] / goal.tpot_s - 1)
    return short * 10 + late

"""Demand on a service, read from the command line, and the possible workers: their divisions of a cluster, and their rates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx_plan.serving.step_cost import (
    Division,
    ServingStep,
    page_room,
    rank_token_bytes,
    requests_held,
    step_s,
)

# Demand: the traffic that arrives, and the objectives of its latency.


class DemandError(ValueError):
    """An invalid field of --traffic or --slo; the message names it and the remedy."""


@dataclass(frozen=True)
class RequestTraffic:
    """Requests that arrive at random and independently of each other (Poisson)."""

    prompt: float
    """Mean tokens of a prompt."""
    text: float
    """Mean tokens of an answer."""
    hit: float = 0.0
    """Share of a prompt's tokens that are already in the KV cache."""
    rate: float = math.inf
    """Requests a second; infinite means the most that the cluster can serve."""
    spread: float = 1.0
    """Standard deviation of the lengths of prompts over their mean."""
    accept: float = 0.0
    """Drafted tokens that a step accepts for each request, from predictions ahead (MTP)."""

    @property
    def new(self) -> float:
        """Tokens of a prompt that prefill computes."""
        return self.prompt * (1 - self.hit)

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a running request in the KV cache: its prompt and half of its answer."""
        return self.prompt + self.text / 2


@dataclass(frozen=True)
class Objectives:
    """Latency objectives in seconds, for 99 in 100 (or ``percentile``) of the requests."""

    ttft_s: float = math.inf
    """To the first token."""
    tpot_s: float = math.inf
    """For each token after it."""
    percentile: float = 0.99


def _seconds(text: str) -> float:
    """Parse a time with its unit, as in ``50ms``, into seconds. Raises ``ValueError``."""
    match = re.fullmatch(r"([\d.]+(?:e[-+]?\d+)?)\s*(us|ms|s|min)", text)
    if match is None:
        raise ValueError("a time with its unit, as in 50ms or 1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[match[2]]


def _number(text: str) -> float:
    """Parse a number that may end in k or M. Raises ``ValueError``."""
    match = re.fullmatch(r"([\d.]+(?:e[-+]?\d+)?)(k|M)?", text)
    if match is None:
        raise ValueError("a number, as in 2000 or 2k")
    return float(match[1]) * {"k": 1e3, "M": 1e6, None: 1.0}[match[2]]


_Reader = tuple[str, Callable[[str], float], float, float]
_TRAFFIC: dict[str, _Reader] = {
    "in": ("prompt", _number, 1, 1e8),
    "out": ("text", _number, 1, 1e8),
    "hit": ("hit", _number, 0, 0.999),
    "rate": ("rate", _number, 1e-9, 1e9),
    "spread": ("spread", _number, 0, 10),
    "accept": ("accept", _number, 0, 16),
}
_SLO: dict[str, _Reader] = {
    "ttft": ("ttft_s", _seconds, 1e-6, 86400),
    "tpot": ("tpot_s", _seconds, 1e-6, 86400),
    "percentile": ("percentile", _number, 0.5, 0.9999),
}


def _read(option: str, text: str, readers: dict[str, _Reader]) -> dict[str, float]:
    """Parse ``key=value`` items joined by commas, by field name; empty items are skipped.

    Raises ``DemandError`` for an unknown or repeated key, or an unreadable value or one outside the field's bounds.
    """
    values: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in readers:
            raise DemandError(f"{option} {item}: there is no field {key!r}: it has {', '.join(readers)}")
        name, reader, least, most = readers[key]
        if name in values:
            raise DemandError(f"{option} {item}: {key} is given twice; leave one out")
        try:
            values[name] = reader(value)
        except ValueError as error:
            raise DemandError(f"{option} {key}={value}: it must be {error}") from None
        if not least <= values[name] <= most:
            raise DemandError(f"{option} {key}={value}: it must be between {least:g} and {most:g}")
    return values


def read_traffic(text: str) -> RequestTraffic:
    """Parse ``in=2000,out=500,hit=0.3,rate=40``; raises ``DemandError`` that names the field, also if in or out is missing."""
    values = _read("--traffic", text, _TRAFFIC)
    missing = [key for key in ("in", "out") if _TRAFFIC[key][0] not in values]
    if missing:
        raise DemandError(f"--traffic {text}: {' and '.join(missing)} missing; as in in=2000,out=500,rate=40")
    return RequestTraffic(**values)


def read_objectives(text: str) -> Objectives:
    """Parse ``ttft=1s,tpot=50ms``; raises ``DemandError`` that names the field."""
    return Objectives(**_read("--slo", text, _SLO))


# Workers.


PREFILL_ROWS = 8192
"""Rows of a prefill step of one group: a chunk, or several short prompts."""


@dataclass(frozen=True)
class Service:
    """A model to serve: its cluster, traffic, objectives and weight format."""

    model: ModelSpec
    cluster: Cluster
    traffic: RequestTraffic
    objectives: Objectives
    format: str = "bf16"


@dataclass(frozen=True)
class PlannedWorker:
    """A division in one role, with the rates of a complete worker."""

    division: Division
    overlap: bool
    prefill_tokens_per_s: float
    """New prompt tokens a second, if the worker does nothing else."""
    prompt_s: float
    """Seconds of the mean prompt's own prefill on one group."""
    running: float
    """Most requests that run at once, within memory and the time of a token."""
    step_s: Callable[[float], float] = field(compare=False)
    """Seconds of a decode step by the number of running requests."""


def divisions(model: ModelSpec, accelerators: int, domain: int) -> Iterator[Division]:
    """Yield the legal (tensor, data, pipeline) divisions of a worker of at most ``accelerators``.

    Tensor ranks are powers of two in one ``domain``. Only mixtures of experts have several data ranks, with at most as
    many tensor x data ranks as experts.
    """
    tensors = [1 << power for power in range(7) if 1 << power <= min(domain, accelerators)]
    kind = attention_kind(model)
    sizes = [size for _, size in kind.tensor_sizes(model)]
    for tensor in tensors:
        keys = kind.key_heads(model)
        if any(size % tensor for size in sizes) or (keys % tensor and tensor % keys):
            continue
        for pipeline in (1, 2, 4, 8, 16):
            if pipeline > model.layers or tensor * pipeline > accelerators:
                continue
            yield Division(tensor, 1, pipeline)
            if model.moe is not None:
                # The data-parallel ranks share out the experts.
                for data in sorted({1 << power for power in range(1, 9)} | {18, 36, 72, 144}):
                    ranks = data * tensor
                    # With more ranks than experts, ranks hold copies, like DeepSeek's redundant experts; other uneven shares are left out.
                    if ranks * pipeline <= accelerators and ranks <= model.moe.experts:
                        yield Division(tensor, data, pipeline)


def shortfalls(service: Service) -> Iterator[float]:
    """Yield, for each division, the bytes that a rank lacks for a single request; negative if there is room."""
    tokens = service.traffic.prompt + service.traffic.text
    for division in divisions(service.model, service.cluster.accelerators, service.cluster.domain.size):
        room = page_room(service.model, service.cluster, division, service.format, PREFILL_ROWS)
        yield rank_token_bytes(service.model, division) * tokens - room


def workers_of(service: Service) -> Iterator[PlannedWorker]:
    """Yield the workers that hold a request of the traffic's length."""
    for division in divisions(service.model, service.cluster.accelerators, service.cluster.domain.size):
        worker = _worker(service, division)
        if worker is not None:
            yield worker


def _worker(service: Service, division: Division) -> PlannedWorker | None:
    """Return a worker with its prefill and decode times; ``None`` if it cannot hold a request of the traffic's full
    length.

    Its most running requests keep the time of a token. Mixtures with data ranks take the faster of overlapped and
    plain steps. Decode time is interpolated between sixths of powers of two.
    """
    model, cluster, traffic = service.model, service.cluster, service.traffic
    request_tokens = traffic.prompt + traffic.text
    if requests_held(model, cluster, division, service.format, PREFILL_ROWS, request_tokens) < 1:
        return None
    room = requests_held(model, cluster, division, service.format, PREFILL_ROWS, traffic.context_tokens)
    prompt = ServingStep(model, cluster, division, service.format, PREFILL_ROWS, traffic.prompt, prefill=True)
    overlaps = (False, True) if model.moe is not None and division.data > 1 else (False,)
    chunk_s = min(step_s(prompt, overlap) for overlap in overlaps)
    own = ServingStep(
        model, cluster, division, service.format, max(1.0, traffic.new), traffic.prompt, prefill=True
    )
    # A pipeline's stages work on different batches; a batch passes through them one after the other.
    turns = division.pipeline
    queries = 2.0 if traffic.accept else 1.0

    @cache
    def at(sixth: int) -> float:
        """Return the seconds of a decode step with ``2 ** (sixth / 6)`` running requests, at the better overlap."""
        rows = max(2 ** (sixth / 6) / division.data / turns, 1.0) * queries
        step = ServingStep(
            model, cluster, division, service.format, rows, traffic.context_tokens, queries=queries
        )
        return min(step_s(step, overlap) for overlap in overlaps)

    def decode_s(running: float) -> float:
        """Return the seconds of a decode step, interpolated between sixths of an octave of running requests."""
        # Between sizes a sixth of a doubling apart, times are nearly linear.
        place = 6 * math.log2(max(running, 1.0))
        below = math.floor(place)
        return at(below) + (at(below + 1) - at(below)) * (place - below)

    running = largest(
        lambda running: decode_s(running) / (1 + traffic.accept), service.objectives.tpot_s, room
    )
    return PlannedWorker(
        division,
        len(overlaps) > 1,
        PREFILL_ROWS * division.data * turns / chunk_s,
        step_s(own),
        running,
        decode_s,
    )


def largest(time: Callable[[float], float], limit: float, room: float) -> float:
    """Return the largest number from 1 to ``room`` whose rising ``time`` stays within ``limit``, to 0.5 %; 0 if 1 exceeds it."""
    if time(1.0) > limit:
        return 0.0
    if time(room) <= limit:
        return room
    low, high = 1.0, room
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time(middle) <= limit else (low, middle)
    return low

"""What a service must carry and keep: the traffic that arrives, and the objectives of its latency, read from the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass


class DemandError(ValueError):
    """A field of --traffic or --slo that cannot be; the message names it and the remedy."""


@dataclass(frozen=True)
class Traffic:
    """Requests that arrive, at random and independently of each other (Poisson)."""

    prompt: float
    """Mean tokens of a prompt."""
    text: float
    """Mean tokens of an answer."""
    hit: float = 0.0
    """Share of a prompt's tokens whose pages are held already."""
    rate: float = math.inf
    """Requests a second; infinite asks for the most that the cluster can serve."""
    spread: float = 1.0
    """Standard deviation of the lengths of prompts over their mean."""
    accept: float = 0.0
    """Drafted tokens that a step accepts for each request, from predictions ahead (MTP)."""

    @property
    def new(self) -> float:
        """Tokens of a prompt that prefill computes."""
        return self.prompt * (1 - self.hit)

    @property
    def held(self) -> float:
        """Mean tokens of a running request whose pages are held: its prompt and half of its answer."""
        return self.prompt + self.text / 2


@dataclass(frozen=True)
class Objectives:
    """The longest times that count as served, in seconds, for the 99 in 100 (or ``percentile``) of the requests."""

    ttft_s: float = math.inf
    """To the first token."""
    tpot_s: float = math.inf
    """For each token after it."""
    percentile: float = 0.99


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([\d.]+(?:e[-+]?\d+)?)\s*(us|ms|s|min)", text)
    if match is None:
        raise ValueError("a time with its unit, as in 50ms or 1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[match[2]]


def _number(text: str) -> float:
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


def _read(option: str, text: str, known: dict[str, _Reader]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in known:
            raise DemandError(f"{option} {item}: there is no field {key!r}: it has {', '.join(known)}")
        name, reader, least, most = known[key]
        if name in found:
            raise DemandError(f"{option} {item}: {key} is given twice; leave one out")
        try:
            found[name] = reader(value)
        except ValueError as error:
            raise DemandError(f"{option} {key}={value}: it must be {error}") from None
        if not least <= found[name] <= most:
            raise DemandError(f"{option} {key}={value}: it must be between {least:g} and {most:g}")
    return found


def read_traffic(text: str) -> Traffic:
    """Reads ``in=2000,out=500,hit=0.3,rate=40``; raises ``DemandError`` naming the field."""
    found = _read("--traffic", text, _TRAFFIC)
    missing = [key for key in ("in", "out") if _TRAFFIC[key][0] not in found]
    if missing:
        raise DemandError(f"--traffic {text}: {' and '.join(missing)} missing; as in in=2000,out=500,rate=40")
    return Traffic(**found)


def read_objectives(text: str) -> Objectives:
    """Reads ``ttft=1s,tpot=50ms``; raises ``DemandError`` naming the field."""
    return Objectives(**_read("--slo", text, _SLO))

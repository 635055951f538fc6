"""Data reading of a run: the records a second that it needs, and those that the store provides.

Each sample is a range of one object. Each node with ranks of the replica that computes it fetches it once, for all of its ranks.
So the fleet requests

    batch / step_s * max(1, nodes / replicas)        ranges a second

of ``(seq_len + 1) * item_bytes`` bytes, plus one block on average, since complete blocks are fetched. The store provides the least of
three: its bandwidth, the rate of the requests in flight (Little's law: ``requests / latency``), and its limit of requests a second. If
more is needed than provided, a step takes as many times longer. ``phalanx status`` applies the same comparison to a run's measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BLOCK_BYTES = 8192
"""Bytes of a dataset that are fetched and compared with a checksum together."""
REQUESTS_AT_ONCE = 32
"""Requests that one replica's readers have in flight (``phalanx.data.reading.cached_shard``)."""
STORE_LATENCY_S = 0.15
"""Amazon's guide to the performance of S3: small objects take "roughly 100-200 milliseconds"."""
STORE_REQUESTS_PER_S = 5500.0
"""The same guide: "at least ... 5,500 GET/HEAD requests per second per partitioned prefix"."""

StoreLimit = Literal["bandwidth", "latency", "requests"]
_FIGURE: dict[StoreLimit, str] = {
    "bandwidth": "data_bytes_per_s",
    "latency": "data_latency_s",
    "requests": "data_requests_per_s",
}
"""Limit -> the assumption that sets it."""
_MOST_SHARE = 1e15
"""Share above which a figure is an error: a step of a second would take thirty million years."""


@dataclass(frozen=True)
class DataNeed:
    """Data that one step reads."""

    samples: int
    """Sequences of the global batch."""
    sample_bytes: int
    """Bytes of one stored sample."""
    remote: bool
    """True if any of it is in an object store; else only bandwidth counts."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sample_bytes < 1:
            raise ValueError(
                f"a step reads samples of some bytes, not {self.samples} of {self.sample_bytes} bytes"
            )


@dataclass(frozen=True)
class DataReading:
    """Read rates that a run needs and that its data's store provides."""

    requests_per_s: float
    """Ranges that the complete fleet needs in a second."""
    bytes_per_s: float
    store_requests_per_s: float
    """Ranges that the store would provide in a second."""
    limit: StoreLimit
    """The limit of the store that binds first."""
    share: float
    """Needed over provided rate; above 1, data bind."""

    @property
    def binds(self) -> bool:
        """True if steps would wait for data despite any read-ahead."""
        return self.share > 1

    @property
    def sentence(self) -> str:
        """The needed and the provided rate in one sentence, with the store's binding limit."""
        return (
            f"{self.requests_per_s:,.4g} records/s ({self.bytes_per_s / 1e6:,.4g} MB/s) are needed, the store gives "
            f"{self.store_requests_per_s:,.4g} ({self.limit}): {self.share:.2%} of it"
        )


def data_reading(
    need: DataNeed,
    step_s: float,
    nodes: float,
    replicas: int,
    *,
    bytes_per_s: float,
    latency_s: float = STORE_LATENCY_S,
    requests_per_s: float = STORE_REQUESTS_PER_S,
) -> DataReading:
    """Return the read rates of a run with steps of ``step_s`` on ``nodes`` nodes, from a store of ``bytes_per_s`` in total.

    Raises ``ValueError`` for a rate that is not above 0, or too low to ever read anything.
    """
    rates = {
        "data_bytes_per_s": bytes_per_s,
        "data_latency_s": latency_s,
        "data_requests_per_s": requests_per_s,
        "step_s": step_s,
    }
    for name, value in rates.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, is {value}")
    needed = need.samples / step_s * max(1.0, nodes / replicas)
    fetched = need.sample_bytes + (BLOCK_BYTES if need.remote else 0)
    gives: dict[StoreLimit, float] = {"bandwidth": bytes_per_s / fetched}
    if need.remote:
        gives["latency"] = REQUESTS_AT_ONCE * max(nodes, replicas) / latency_s
        gives["requests"] = requests_per_s
    limit = min(gives, key=lambda name: gives[name])
    share = needed / gives[limit] if gives[limit] else math.inf
    if not share < _MOST_SHARE:
        name = _FIGURE[limit]
        raise ValueError(
            f"{name} = {rates[name]:g} gives next to nothing, and no step would ever have its samples; "
            f"give a figure of the store (--assume {name}=...)"
        )
    return DataReading(needed, needed * fetched, gives[limit], limit, share)


def stored_sample_bytes(seq_len: int, vocab_size: int) -> int:
    """Return the bytes of a sample and its last target in token shards: 2 a token, or 4 for a larger vocabulary."""
    return (seq_len + 1) * (2 if vocab_size <= 1 << 16 else 4)


def waiting_note(reading: DataReading) -> str:
    """Return the note of a plan whose data reading limits the step, with the remedy; else empty."""
    if not reading.binds:
        return ""
    remedy = {
        "bandwidth": "a store or a disk that gives more (--assume data_bytes_per_s=...), or copies in each node's cache (data.cache_gib) after a first epoch",
        "latency": "a nearer store (--assume data_latency_s=...), or longer sequences: the number of requests in flight is limited",
        "requests": "the dataset under several prefixes, each of which has such a limit (--assume data_requests_per_s=...)",
    }[reading.limit]
    return f"data would bind: {reading.sentence}; steps would take {math.ceil(10 * reading.share) / 10:g} times as long, which nothing here counts: {remedy}"

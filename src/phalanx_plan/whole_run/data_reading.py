"""Whether a run would wait for its data: records a second that are needed against those that the store gives.

Each sample is a range of one object. It is fetched once by each node that has ranks of the replica that computes it, however many ranks want it there.
So the fleet asks for

    batch / step_s * max(1, nodes / replicas)        ranges a second

of ``(seq_len + 1) * item_bytes`` bytes and, since blocks are fetched whole, of one block more on average. The store gives the least of three: its bandwidth,
what the requests under way bring (Little's law: ``requests / latency``), and the requests that it answers at all. Where more is needed than given, a step takes as
many times longer. ``phalanx status`` says the same of a run from what it measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BLOCK_BYTES = 8192
"""Bytes of a dataset that are fetched and compared with a checksum together."""
REQUESTS_AT_ONCE = 32
"""Requests that one replica's readers have under way (``phalanx.data.reading.cached_shard``)."""
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
"""The assumption that each limit is of."""
_MOST_SHARE = 1e15
"""From here on a figure is a slip: a step of a second would take thirty million years."""


@dataclass(frozen=True)
class DataNeed:
    """What one step reads."""

    samples: int
    """Sequences of the global batch."""
    sample_bytes: int
    """Bytes of one as it is stored."""
    remote: bool
    """True if any of it lies in an object store; else only bandwidth counts."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sample_bytes < 1:
            raise ValueError(
                f"a step reads samples of some bytes, not {self.samples} of {self.sample_bytes} bytes"
            )


@dataclass(frozen=True)
class DataReading:
    """What a run needs of the place where its data lie, and what that gives."""

    requests_per_s: float
    """Ranges that the whole fleet needs in a second."""
    bytes_per_s: float
    store_requests_per_s: float
    """Ranges that it would get."""
    limit: StoreLimit
    """What keeps it from getting more."""
    share: float
    """Needed over given; above 1, data bind."""

    @property
    def binds(self) -> bool:
        """True if steps would wait for data, however far is read ahead."""
        return self.share > 1

    @property
    def sentence(self) -> str:
        """What is needed against what is given, and which of the store's limits that is."""
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
    """The rates of a run whose steps take ``step_s`` on so many nodes, from a store that gives ``bytes_per_s`` in all.

    Raises ``ValueError`` for a rate that is not above 0, or so low that nothing would ever be read.
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
    """Bytes of a sample and its last target as token shards hold it: 2 a token, or 4 of a larger vocabulary."""
    return (seq_len + 1) * (2 if vocab_size <= 1 << 16 else 4)


def waiting_note(reading: DataReading) -> str:
    """What a plan says where data bind, with what mends it; empty where they do not."""
    if not reading.binds:
        return ""
    remedy = {
        "bandwidth": "a store or a disk that gives more (--assume data_bytes_per_s=...), or copies in each node's cache (data.cache_gib) after a first epoch",
        "latency": "a nearer store (--assume data_latency_s=...), or longer sequences: more is not asked for at once",
        "requests": "the dataset under several prefixes, each of which has such a limit (--assume data_requests_per_s=...)",
    }[reading.limit]
    return f"data would bind: {reading.sentence}; steps would take {math.ceil(10 * reading.share) / 10:g} times as long, which nothing here counts: {remedy}"

"""Resources that a run takes from its site: energy, money, and records a second from the store of its data.

An accelerator draws its idle power, plus a part of the remaining power up to its rating that depends on
its activity: matrix products reach the rated power, waiting for the network does not. A node's other parts
draw a constant. The site multiplies everything by its power usage effectiveness (PUE). Published figures for
complete sites are averages over all of this, so every part is shown.

A rented accelerator's price contains its electricity; an owned one's does not. Either way the spares are paid
for, and every hour counts in which the run held its machines, not only productive ones.

Each sample is a range of one object. Each node with ranks of the replica that computes it fetches it once, for all of its ranks.
So the fleet requests

    batch / step_s * max(1, nodes / replicas)        ranges a second

of ``(seq_len + 1) * item_bytes`` bytes, plus one block on average, since complete blocks are fetched. The store provides the least of
three: its bandwidth, the rate of the requests in flight (Little's law: ``requests / latency``), and its limit of requests a second. If
more is needed than provided, a step takes as many times longer. ``phalanx status`` applies the same comparison to a run's measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.hardware.cluster import Accelerator, Cluster, Fact

# Energy.


J_PER_KWH = 3.6e6

Activity = Literal["compute", "memory", "communication", "idle"]

DRAW: Mapping[Activity, Fact] = {
    "compute": Fact(
        1.0,
        "peak draw in LLM training iterations often reaches or exceeds the rated power (POLCA, arXiv:2308.12908)",
    ),
    "memory": Fact(0.6, "assumption: memory-bound kernels leave the matrix units idle"),
    "communication": Fact(
        0.3,
        "assumption: communication phases draw much less than compute phases (arXiv:2508.14318), by how much varies",
    ),
    "idle": Fact(0.1, "assumption: bubbles are too short for the clocks to fall to idle"),
}
"""Share of (rated - idle) power that is drawn on top of idle, by activity."""

GRID_KG_PER_KWH = Fact(
    0.4296,
    "EPA eGRID2018: 947 lb CO2 per MWh, mean of the United States; set the intensity of your own grid",
    "2020-01",
)


class EnergyError(ValueError):
    """Shares that do not sum to one, or times that are negative."""


def accelerator_power_w(accelerator: Accelerator, shares: Mapping[Activity, float]) -> float:
    """Mean power (W) of an accelerator that spends these shares of its time: idle power, and ``DRAW`` of the range up
    to rated.

    Raises ``EnergyError`` for an unknown activity, or unless the shares are at least 0 and sum to 1.
    """
    unknown = set(shares) - set(get_args(Activity))
    if unknown or abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise EnergyError(
            f"shares of {', '.join(get_args(Activity))} must be >= 0 and sum to 1: {dict(shares)}"
        )
    idle_w, rated_w = accelerator.idle_power_w.value, accelerator.power_w.value
    return idle_w + (rated_w - idle_w) * sum(share * DRAW[name].value for name, share in shares.items())


@dataclass(frozen=True)
class Energy:
    """Energy of a run in kWh by consumer; the parts sum to the total."""

    steps_kwh: float
    """Accelerators, while they take steps (also those that a failure undoes)."""
    waiting_kwh: float
    """Accelerators, during stalls and recoveries."""
    spares_kwh: float
    """Accelerators of idle spares."""
    nodes_kwh: float
    """CPUs, NICs, fans of all nodes, spares included."""
    facility_kwh: float
    """Cooling and conversion: (PUE - 1) x the rest."""

    @property
    def total_kwh(self) -> float:
        return self.it_kwh + self.facility_kwh

    @property
    def it_kwh(self) -> float:
        return self.steps_kwh + self.waiting_kwh + self.spares_kwh + self.nodes_kwh

    def co2_kg(self, grid_kg_per_kwh: float) -> float:
        """Emitted by the grid for it."""
        return self.total_kwh * grid_kg_per_kwh


def energy(
    cluster: Cluster,
    accelerators: int,
    spare_accelerators: int,
    wall_s: float,
    step_share: float,
    shares: Mapping[Activity, float],
) -> Energy:
    """Energy of ``accelerators`` for ``wall_s`` seconds, of which ``step_share`` (0 to 1) in steps.

    ``shares``: what an accelerator does during a step, see ``accelerator_power_w``. Spares, hosts and cooling are
    included, in kWh. Raises ``EnergyError`` for a share out of range or a negative time.
    """
    if not 0 <= step_share <= 1 or wall_s < 0:
        raise EnergyError(f"step_share must be in [0, 1] and wall_s >= 0: {step_share=}, {wall_s=}")
    accelerator = cluster.accelerator
    step_w = accelerator_power_w(accelerator, shares)
    idle_w = accelerator.idle_power_w.value
    kwh_per_w = wall_s / J_PER_KWH
    steps = accelerators * step_w * step_share * kwh_per_w
    waiting = accelerators * idle_w * (1 - step_share) * kwh_per_w
    spares = spare_accelerators * idle_w * kwh_per_w
    nodes = (accelerators + spare_accelerators) / cluster.per_node * cluster.node_power_w.value * kwh_per_w
    facility = (cluster.pue.value - 1) * (steps + waiting + spares + nodes)
    return Energy(steps, waiting, spares, nodes, facility)


# Cost.


HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S

ELECTRICITY_USD_PER_KWH = Fact(
    0.078,
    "industrial rate used for a 100,000 H100 cluster by NextBigFuture after SemiAnalysis and the EIA",
    "2024",
)
STORAGE_USD_PER_GB_MONTH = Fact(0.023, "assumption: list price of a public object store's standard class")


class CostError(ValueError):
    """Negative prices or quantities."""


@dataclass(frozen=True)
class RunCost:
    """US dollars by item; they sum to the total."""

    accelerators_usd: float
    spares_usd: float
    electricity_usd: float
    """Zero where the rent includes it."""
    storage_usd: float

    @property
    def total_usd(self) -> float:
        return self.accelerators_usd + self.spares_usd + self.electricity_usd + self.storage_usd


def cost(
    *,
    accelerators: int,
    spare_accelerators: int,
    wall_s: float,
    usd_per_accelerator_hour: float,
    energy_kwh: float,
    usd_per_kwh: float = ELECTRICITY_USD_PER_KWH.value,
    electricity_in_price: bool = True,
    stored_bytes: float = 0.0,
    usd_per_gb_month: float = STORAGE_USD_PER_GB_MONTH.value,
) -> RunCost:
    """Cost of a run of ``wall_s`` seconds in dollars. ``stored_bytes``: of checkpoints kept, on average over the run.

    Electricity costs nothing if ``electricity_in_price``. For owned machines, ``usd_per_accelerator_hour`` is their
    depreciation, and ``electricity_in_price`` is False. Raises ``CostError`` for a negative amount.
    """
    amounts = {
        "accelerators": accelerators,
        "spare_accelerators": spare_accelerators,
        "wall_s": wall_s,
        "usd_per_accelerator_hour": usd_per_accelerator_hour,
        "energy_kwh": energy_kwh,
        "usd_per_kwh": usd_per_kwh,
        "stored_bytes": stored_bytes,
        "usd_per_gb_month": usd_per_gb_month,
    }
    for name, amount in amounts.items():
        if amount < 0:
            raise CostError(f"{name} must not be negative, is {amount}")
    hour_usd = usd_per_accelerator_hour * wall_s / HOUR_S
    return RunCost(
        accelerators_usd=accelerators * hour_usd,
        spares_usd=spare_accelerators * hour_usd,
        electricity_usd=0.0 if electricity_in_price else energy_kwh * usd_per_kwh,
        storage_usd=stored_bytes / 1e9 * usd_per_gb_month * wall_s / MONTH_S,
    )


# Data reading.


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
    """Return the read rates of a run with steps of ``step_s`` on ``nodes`` nodes, from a store of ``bytes_per_s`` in
    total.

    Local data is limited by bandwidth only; remote data by the lowest of bandwidth, latency and requests. Nodes of
    one replica read the same records. Raises ``ValueError`` for a rate that is not above 0, or too low to ever read
    anything.
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
    """Return the note of a plan whose data reading limits the step, with the remedy; empty if it does not."""
    if not reading.binds:
        return ""
    remedy = {
        "bandwidth": "a store or a disk that gives more (--assume data_bytes_per_s=...), or copies in each node's cache (data.cache_gib) after a first epoch",
        "latency": "a nearer store (--assume data_latency_s=...), or longer sequences: the number of requests in flight is limited",
        "requests": "the dataset under several prefixes, each of which has such a limit (--assume data_requests_per_s=...)",
    }[reading.limit]
    return f"data would bind: {reading.sentence}; steps would take {math.ceil(10 * reading.share) / 10:g} times as long, which nothing here counts: {remedy}"

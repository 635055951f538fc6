"""Failure rates: frequency and extent of failures, and the spares that they require; and the causes of single failures.

A rate is counted in device-days, so that it applies to a fleet of any size: accelerators fail by the
accelerator-day, hosts and their software by the node-day. The typical rates are the counts of the largest run
that published its causes one by one (Llama 3 405B, arXiv:2407.21783, Table 5: 419 unexpected interruptions of
16,384 H100 in 54 days). Three fleets that published a rate of nodes differ by a factor of 2.8. It is unknown
which of them the next fleet will resemble, so every rate is a range, and estimates from it
should be ranges too.

Failures are modeled as memoryless and independent. They are not quite: see ``CORRELATED_DOMAINS``. A simulated fleet (``phalanx simulate``)
draws the cause of each failure, whose scope decides how it is detected and what is lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist
from typing import Literal

import numpy as np

from phalanx.hardware.cluster import Cluster

DAY_S = 86_400.0

RateLevel = Literal["low", "typical", "high"]

_LLAMA3 = "Llama 3 405B, arXiv:2407.21783, Table 5: 54 days of 16,384 H100"
_LLAMA3_ACCELERATOR_DAYS = 54 * 16_384
_LLAMA3_NODE_DAYS = _LLAMA3_ACCELERATOR_DAYS / 8

# Failures per 1,000 days of an 8-GPU node. The classes inherit the range between fleets.
FLEETS: Mapping[str, tuple[float, str]] = {
    "Meta RSC-2": (2.34, "8k A100, arXiv:2410.21680"),
    "Llama 3 405B": (1000 * 419 / _LLAMA3_NODE_DAYS, _LLAMA3),
    "Meta RSC-1": (6.50, "16k A100, arXiv:2410.21680"),
}
_LOW = 2.34 / FLEETS["Llama 3 405B"][0]
_HIGH = 6.50 / FLEETS["Llama 3 405B"][0]
RANGE_SOURCE = "low and high: Meta RSC-2 and RSC-1 over Llama 3, failures per node-day (arXiv:2410.21680)"


@dataclass(frozen=True)
class FailureClass:
    """One kind of failure, and its rate per 1,000 device-days."""

    name: str
    device: Literal["accelerator", "node"]
    low: float
    typical: float
    high: float
    takes_node: bool
    """True if the node must be repaired; otherwise the same machines continue after a restart."""
    source: str

    def per_s(self, cluster: Cluster, accelerators: int, level: RateLevel) -> float:
        """Failures a second of a job on so many accelerators of the cluster."""
        devices = accelerators if self.device == "accelerator" else accelerators / cluster.per_node
        rate: float = {"low": self.low, "typical": self.typical, "high": self.high}[level]
        return devices * rate / (1000 * DAY_S)


LLAMA3_INTERRUPTIONS: Mapping[str, int] = {
    "faulty GPU": 148,
    "GPU HBM3": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog": 7,
    "silent data corruption": 6,
    "GPU thermal interface, sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Unexpected ones by cause (``_LLAMA3``). The counts: the table's printed percentages do not add up."""


def _llama3(
    name: str, device: Literal["accelerator", "node"], *causes: str, takes_node: bool = True
) -> FailureClass:
    """Return the failure class of some of Llama 3's causes, in failures per 1,000 device-days.

    Low and high are the typical rate times the factors ``_LOW`` and ``_HIGH``.
    """
    count = sum(LLAMA3_INTERRUPTIONS[cause] for cause in causes)
    days = _LLAMA3_ACCELERATOR_DAYS if device == "accelerator" else _LLAMA3_NODE_DAYS
    typical = 1000 * count / days
    source = f"{count} in {_LLAMA3}; {RANGE_SOURCE}"
    return FailureClass(name, device, _LOW * typical, typical, _HIGH * typical, takes_node, source)


CLASSES: tuple[FailureClass, ...] = (
    _llama3("gpu", "accelerator", "faulty GPU"),
    _llama3("gpu memory", "accelerator", "GPU HBM3"),
    _llama3("gpu sram", "accelerator", "GPU SRAM"),
    _llama3("gpu system processor", "accelerator", "GPU system processor"),
    _llama3("silent data corruption", "accelerator", "silent data corruption"),
    _llama3("gpu thermal interface or sensor", "accelerator", "GPU thermal interface, sensor"),
    # One NIC per accelerator, and so are the cable and its share of the switches.
    _llama3("network switch or cable", "accelerator", "network switch or cable"),
    _llama3("nic", "accelerator", "NIC"),
    _llama3("unplanned host maintenance", "node", "host maintenance"),
    _llama3("ssd", "node", "SSD"),
    _llama3("power supply", "node", "power supply"),
    _llama3(
        "chassis, io board, cpu, host memory", "node", "server chassis", "IO board", "CPU", "system memory"
    ),
    _llama3("software", "node", "software bug", takes_node=False),
    _llama3("collective watchdog timeout", "node", "NCCL watchdog", takes_node=False),
    _llama3("service that the job depends on", "node", "dependency", takes_node=False),
)


@dataclass(frozen=True)
class CorrelatedDomain:
    """Machines that fail together. No primary source states a rate of these. They are listed, not modeled
    one by one, and enter as the share of failures that a copy in a peer's memory does not survive.
    """

    name: str
    takes_down: str
    evidence: str


CORRELATED_DOMAINS: tuple[CorrelatedDomain, ...] = (
    CorrelatedDomain(
        "scale-up domain (NVLink rack)",
        "all nodes of the rack when its switches or cooling fail",
        "no rate published for 72-GPU racks",
    ),
    CorrelatedDomain(
        "leaf switch",
        "the nodes that hang on it, unless every node has several rails",
        "co-occurring failures: 3 % and 5 % (arXiv:2410.21680)",
    ),
    CorrelatedDomain(
        "power feed",
        "a row of racks",
        "catastrophic cases, 32 machines at once: under 1 % (ByteRobust, arXiv:2509.16293)",
    ),
)


class FailureModelError(ValueError):
    """Rates, times or probabilities that no fleet can have."""


def failures_per_s(
    cluster: Cluster,
    accelerators: int | None = None,
    level: RateLevel = "typical",
    classes: Sequence[FailureClass] = CLASSES,
    takes_node: bool | None = None,
) -> float:
    """Interruptions a second of a job on ``accelerators`` of the cluster (all of them, if None).

    ``takes_node`` selects the failures that cost a machine (True) or do not (False); None counts all. Raises
    ``FailureModelError`` for fewer than one accelerator.
    """
    number = cluster.accelerators if accelerators is None else accelerators
    if number < 1:
        raise FailureModelError(f"accelerators must be at least 1, is {number}")
    chosen = [
        failure_class
        for failure_class in classes
        if takes_node is None or failure_class.takes_node == takes_node
    ]
    return sum(failure_class.per_s(cluster, number, level) for failure_class in chosen)


def mtti_s(per_s: float) -> float:
    """Mean time to interruption (s) at so many failures a second; infinite if nothing fails.

    Raises ``FailureModelError`` for a negative rate.
    """
    if per_s < 0:
        raise FailureModelError(f"failures per second must not be negative, is {per_s}")
    return 1 / per_s if per_s else float("inf")


def classes_at_node_rate(per_1000_node_days: float) -> tuple[FailureClass, ...]:
    """The classes, scaled together until a node of eight accelerators fails at a rate that a fleet measured.

    The shares of the causes and the factors from typical to low and high stay as they are. Raises ``FailureModelError``
    unless the rate is positive and finite.
    """
    if not 0 < per_1000_node_days < math.inf:
        raise FailureModelError(
            f"failures per 1,000 node-days must be positive and finite, is {per_1000_node_days}; published: "
            + ", ".join(f"{name} {rate:.2f}" for name, (rate, _) in FLEETS.items())
        )
    published_rate = sum(
        failure_class.typical * (8 if failure_class.device == "accelerator" else 1)
        for failure_class in CLASSES
    )
    factor = per_1000_node_days / published_rate
    return tuple(
        replace(
            failure_class,
            low=failure_class.low * factor,
            typical=failure_class.typical * factor,
            high=failure_class.high * factor,
            source=f"scaled to {per_1000_node_days:g} failures per 1,000 node-days; {failure_class.source}",
        )
        for failure_class in CLASSES
    )


def nodes_in_repair(node_losses_per_s: float, repair_s: float) -> float:
    """Return the mean number of nodes in repair: Little's law, for any distribution of the repair time.

    Raises ``FailureModelError`` for a negative time.
    """
    if repair_s < 0:
        raise FailureModelError(f"repair_s must not be negative, is {repair_s}")
    return node_losses_per_s * repair_s


_NEARLY_NORMAL = 1e6
"""A mean number of nodes in repair above which their number is normal to a thousandth of its spread."""


def spares_needed(node_losses_per_s: float, repair_s: float, confidence: float = 0.99) -> int:
    """Return the smallest number of spare nodes that suffices with probability ``confidence`` at a random moment.

    Nodes in repair are Poisson with mean rate x repair time for any distribution of that time (Palm's theorem for the
    M/G/infinity queue; the limit of the binomial of ByteRobust, arXiv:2509.16293, for many nodes). Raises
    ``FailureModelError`` for a confidence outside [0, 1).
    """
    if not 0 <= confidence < 1:
        raise FailureModelError(f"confidence must be in [0, 1), is {confidence}; 0.99 is usual")
    mean = nodes_in_repair(node_losses_per_s, repair_s)
    if mean == 0:
        return 0
    if mean > _NEARLY_NORMAL:
        above = NormalDist().inv_cdf(max(confidence, 1e-300)) * math.sqrt(mean)
        return max(0, math.ceil(mean + above))
    # Ten standard deviations and a few counts more include every quantile that a float can distinguish from 1.
    counts = np.arange(int(mean + 10 * mean**0.5) + 40)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    below = np.cumsum(np.exp(counts * np.log(mean) - mean - log_factorial))
    return min(int(np.searchsorted(below, confidence)), len(counts) - 1)


# Causes of single failures, for simulations of a fleet. Causes and shares are Llama 3's; DEFAULT_RATE is within the range of FLEETS.
# Times to repair are not published by cause; they are assumptions, and marked as such.


DEFAULT_RATE = 3.79
"""Failures per 1,000 node-days of 8 accelerators (arXiv:2407.21783, derived)."""
CO_OCCURRING = 0.03
"""Share of failures that strike several nodes at once (arXiv:2410.21680: 3 and 5 %). Assumed to take a rack."""
WHOLE_SWITCH = 0.3
"""Share of these that take all racks of a switch (assumed)."""
SILENT = 0.1
"""Share of node losses that break no connection, so that only the missing heartbeat shows them (assumed)."""
HOUR_S = 3_600.0


class FailureScope(StrEnum):
    """The extent of a failure, which decides how it is detected."""

    WORKER = "worker"
    """A process ends; its agent sees that at once and starts another."""
    HANG = "hang"
    """A process stops answering; its lease with its agent runs out."""
    NODE = "node"
    """A machine is lost until it is repaired."""
    RESULT = "result"
    """Nothing stops, but results are wrong; an audit finds it."""
    RACK = "rack"
    SWITCH = "switch"


@dataclass(frozen=True)
class Cause:
    """One cause of interruptions."""

    name: str
    scope: FailureScope
    repair_s: float
    """Mean time until the node is back (assumed)."""


def _cause(name: str) -> Cause:
    """Return a cause with its scope and mean seconds of repair: a minute for software, hours or a day for hardware.

    An unknown one takes a node for a day.
    """
    match name:
        case "software bug" | "dependency":
            return Cause(name, FailureScope.WORKER, 60.0)
        case "NCCL watchdog":
            return Cause(name, FailureScope.HANG, 60.0)
        case "silent data corruption":
            return Cause(name, FailureScope.RESULT, DAY_S)
        case "network switch or cable":
            return Cause(name, FailureScope.NODE, 4 * HOUR_S)
        case "host maintenance":
            return Cause(name, FailureScope.NODE, 2 * HOUR_S)
        case _:
            return Cause(name, FailureScope.NODE, DAY_S)


CAUSES = tuple(_cause(name) for name in LLAMA3_INTERRUPTIONS)
RACK_LOST = Cause("rack", FailureScope.RACK, 2 * HOUR_S)
SWITCH_LOST = Cause("switch", FailureScope.SWITCH, 2 * HOUR_S)


def draw_cause(random_numbers: random.Random) -> Cause:
    """Draw the cause of one interruption."""
    if random_numbers.random() < CO_OCCURRING:
        return SWITCH_LOST if random_numbers.random() < WHOLE_SWITCH else RACK_LOST
    return random_numbers.choices(CAUSES, list(LLAMA3_INTERRUPTIONS.values()))[0]

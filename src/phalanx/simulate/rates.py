"""How often what fails in a large fleet, and how long it is gone: published figures, and what had to be assumed.

The causes and their shares are Table 5 of The Llama 3 Herd of Models (arXiv:2407.21783): 419 unexpected interruptions in
54 days on up to 16,384 H100 GPUs, that is 3.79 per 1,000 node-days (its counts are used; its printed percentages do not
add up). Other fleets: 2.34 and 6.50 (Revisiting Reliability, arXiv:2410.21680), so the rate is an input with that range.
Times to repair are published nowhere by cause; they are assumptions, and marked as such.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_RATE = 3.79
"""Failures per 1,000 node-days of 8 accelerators (arXiv:2407.21783, derived)."""
CO_OCCURRING = 0.03
"""Share of failures that come with others (arXiv:2410.21680: 3 and 5 %). Assumed to take a rack."""
WHOLE_SWITCH = 0.3
"""Share of these that take all racks of a switch (assumed)."""
SILENT = 0.1
"""Share of node losses that break no connection, so that only the heartbeat tells (assumed)."""
DAY_S, HOUR_S = 86_400.0, 3_600.0


class Scope(StrEnum):
    """What a cause takes away, and so who notices how."""

    WORKER = "worker"
    """One process ends; its agent sees that at once and starts another."""
    HANG = "hang"
    """One process stops answering; its agent's lease runs out."""
    NODE = "node"
    """The machine goes, to be repaired."""
    RESULT = "result"
    """Nothing stops, but numbers are wrong; an audit finds it."""
    RACK = "rack"
    SWITCH = "switch"


@dataclass(frozen=True)
class Cause:
    """One cause of interruptions."""

    name: str
    count: int
    """Of the 419."""
    scope: Scope
    repair_s: float
    """Mean time until the node is back (assumed)."""


CAUSES = (
    Cause("faulty GPU", 148, Scope.NODE, DAY_S),
    Cause("GPU HBM3", 72, Scope.NODE, DAY_S),
    Cause("software bug", 54, Scope.WORKER, 60.0),
    Cause("network switch or cable", 35, Scope.NODE, 4 * HOUR_S),
    Cause("host maintenance", 32, Scope.NODE, 2 * HOUR_S),
    Cause("GPU SRAM", 19, Scope.NODE, DAY_S),
    Cause("GPU system processor", 17, Scope.NODE, DAY_S),
    Cause("NIC", 7, Scope.NODE, DAY_S),
    Cause("NCCL watchdog", 7, Scope.HANG, 60.0),
    Cause("silent data corruption", 6, Scope.RESULT, DAY_S),
    Cause("GPU thermal interface, sensor", 6, Scope.NODE, DAY_S),
    Cause("SSD", 3, Scope.NODE, DAY_S),
    Cause("power supply", 3, Scope.NODE, DAY_S),
    Cause("server chassis", 2, Scope.NODE, DAY_S),
    Cause("IO board", 2, Scope.NODE, DAY_S),
    Cause("dependency", 2, Scope.WORKER, 60.0),
    Cause("CPU", 2, Scope.NODE, DAY_S),
    Cause("system memory", 2, Scope.NODE, DAY_S),
)
RACK_LOST = Cause("rack", 0, Scope.RACK, 2 * HOUR_S)
SWITCH_LOST = Cause("switch", 0, Scope.SWITCH, 2 * HOUR_S)


def draw_cause(random_numbers: random.Random) -> Cause:
    """What an interruption is due to."""
    if random_numbers.random() < CO_OCCURRING:
        return SWITCH_LOST if random_numbers.random() < WHOLE_SWITCH else RACK_LOST
    return random_numbers.choices(CAUSES, [cause.count for cause in CAUSES])[0]

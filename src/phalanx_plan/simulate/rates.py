"""Failure rates, causes and repair times of large fleets: published figures, and assumptions where there are none.

The causes and their shares are Table 5 of The Llama 3 Herd of Models (arXiv:2407.21783): 419 unexpected interruptions in
54 days on up to 16,384 H100 GPUs, that is 3.79 per 1,000 node-days. Other fleets: 2.34 and 6.50 (Revisiting
Reliability, arXiv:2410.21680), so the rate is an input with that range. Times to repair are not published by cause; they
are assumptions, and marked as such.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from phalanx_plan.whole_run.failures import DAY_S, LLAMA3_INTERRUPTIONS

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
    """Draws the cause of one interruption."""
    if random_numbers.random() < CO_OCCURRING:
        return SWITCH_LOST if random_numbers.random() < WHOLE_SWITCH else RACK_LOST
    return random_numbers.choices(CAUSES, list(LLAMA3_INTERRUPTIONS.values()))[0]

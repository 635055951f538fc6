"""Asks all rules, and puts what they say in order: the worst first, and of equals what began first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from phalanx.watch.why.observed import Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.rules.ended import failed, gone, never_began, queued
from phalanx.watch.why.rules.fleet import (
    fewer_ranks,
    hardware,
    lost_nodes,
    no_coordinator,
    no_spares,
    nodes_back,
    not_finite_nodes,
    straggler,
)
from phalanx.watch.why.rules.numbers import diverged, imbalance, not_finite, spike
from phalanx.watch.why.rules.pace import low_goodput, slow_data, slower_than_before
from phalanx.watch.why.rules.saving import failed_checkpoints, full_disk, old_checkpoint
from phalanx.watch.why.rules.standstill import standstill
from phalanx.watch.why.rules.surroundings import clock_skew, other_data, other_libraries, throttled

Rule = Callable[[Observed], Iterator[Reason]]
RULES: tuple[Rule, ...] = (
    *(failed, gone, never_began, queued, standstill),
    *(not_finite, spike, diverged, other_data, no_coordinator),
    *(failed_checkpoints, full_disk, old_checkpoint),
    *(not_finite_nodes, lost_nodes, nodes_back, fewer_ranks, no_spares, hardware, throttled, straggler),
    *(slow_data, slower_than_before, low_goodput, imbalance),
    *(other_libraries, clock_skew),
)
"""In the order in which those of equal weight are named."""
_ORDER = ("critical", "warning", "info")


def judge(seen: Observed) -> list[Reason]:
    """All reasons, worst first."""
    found = [reason for rule in RULES for reason in rule(seen)]
    return sorted(found, key=lambda one: (_ORDER.index(one.severity), one.since or math.inf))

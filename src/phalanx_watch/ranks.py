"""The ranks of a run side by side: their nodes, the orders in which they are drawn, and those that are slower than their peers.

The ranks of a slow node, of a slow switch or of a slow pipeline stage may be far apart by their numbers; in the right order they are one band.

A fleet judges its ranks while it runs, window by window; a run without one has nobody who does. ``slowest`` judges the newest frames of one
attempt together, for people, by the thresholds that replace stragglers in a fleet. A rank is slow if it was slower than its peers in most of
the windows, and its median over all of them stands out from theirs. With fewer windows than that rule needs, none is slow. This sees more than
one window does, where few ranks share a noisy machine. Peers are the ranks of one pipeline stage, which do the same work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.health.stragglers import StragglerRule, lateness, roles
from phalanx.observe.event_log import newest_event
from phalanx.observe.events import RunStarted
from phalanx.observe.rank_stream import RankStream
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.layout import Layout, layout_of, replica_ranks

# The layout is the one that the attempt logged at its start: a fleet that lost nodes may have gone on under smaller degrees.
# Nodes are those that ``fleet.json`` names now; those of earlier epochs are not kept.


def layout_of_attempt(directory: RunDirectory, attempt: int, ranks: int) -> Layout:
    """The layout of an attempt that had ``ranks`` ranks, by its first event, or else by the run file.

    Raises ``RunDirectoryError`` or ``EventLogError`` if the directory is not that of a run.
    """
    parallel = read_resolved(directory).parallel
    started = newest_event(
        directory.events, lambda event: event.attempt == attempt and isinstance(event.body, RunStarted)
    )
    least = replica_ranks(parallel)
    if started is not None and isinstance(started.body, RunStarted):
        axes = {axis: started.body.layout.get(axis, 1) for axis in Layout().degrees}
        told = replace(layout_of(parallel, least), **axes)  # events do not tell how experts are divided
        if told.ranks == ranks and min(axes.values()) >= 1:
            return told
    planned = layout_of(parallel, ranks) if ranks >= least else Layout()
    return planned if planned.ranks == ranks else Layout(replicate=ranks)


def nodes_of_ranks(directory: RunDirectory, ranks: int) -> dict[int, str]:
    """The node of each rank of a fleet that has ``ranks`` of them now; empty without a fleet, or if it has another number by now."""
    with suppress(FleetFileError):
        fleet = read_fleet_file(directory.path)
        if fleet.ranks == ranks:
            return {rank: member.name for member in fleet.members for rank in member.ranks}
    return {}


# Orders of drawing.


BY_RANK, BY_NODE = "rank", "node"
_DIGITS = re.compile(r"(\d+)")


def orders(layout: Layout | None, nodes: Mapping[int, str]) -> list[str]:
    """The names of the orders that make a difference for a run."""
    axes = [axis for axis, degree in layout.degrees.items() if degree > 1] if layout else []
    return [BY_RANK, *([BY_NODE] if nodes else []), *(axes if len(axes) > 1 else [])]


def in_order(name: str, ranks: int, layout: Layout | None, nodes: Mapping[int, str]) -> NDArray[np.int64]:
    """All ranks in the order ``name``, ``(ranks,)``; those that have no node come last. By their numbers for a name that is not theirs."""
    numbers = np.arange(ranks, dtype=np.int64)
    if name == BY_NODE and nodes:
        places = {node: place for place, node in enumerate(sorted(set(nodes.values()), key=_natural))}
        keys = np.fromiter(
            (places.get(nodes.get(rank, ""), len(places)) for rank in range(ranks)), np.int64, ranks
        )
        return np.argsort(keys, kind="stable")
    if layout is not None and layout.ranks == ranks and name in layout.degrees:
        stride = 1
        for axis, degree in reversed(layout.degrees.items()):
            if axis == name:
                return np.argsort(numbers // stride % degree, kind="stable")
            stride *= degree
    return numbers


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which node-9 comes before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


# Ranks that are slower than their peers.


_RULE = StragglerRule()
LEAST: Mapping[str, float] = {
    "compute_s": 1e-6,
    "data_wait_s": 1e-3,
    "memory_bytes": 2.0**20,
    "temperature_c": 1.0,
}
"""What is less is taken for that much: a rank that waits for twice as little as nothing is not late."""


@dataclass(frozen=True)
class RankLateness:
    """One rank beside its peers, over some windows."""

    rank: int
    value: float
    """Its typical number: the median of the windows."""
    typical: float
    """The same of its peers: the lower median of theirs."""
    slowdown: float
    """Its number over that of its peers, less one."""
    deviations: float
    """The same in standard deviations of its peers."""
    slower: int
    """The number of windows in which it was slower by more than the rule asks for."""
    windows: int
    slow: bool
    """True if that were most windows, and it stands out."""
    late_share: float = 0.0
    """The time that its peers have waited for it in the windows in which it was slower, over their own time in all of them."""


def newest_windows(stream: RankStream, last: int, attempt: int | None = None) -> range:
    """The numbers of the newest ``last`` frames of an attempt, by default of the newest one; they have all the same ranks."""
    end = len(stream)
    while attempt is not None and end and stream.head(end - 1).attempt != attempt:
        end -= 1
    first = end
    while first and end - first < last and _of_one_epoch(stream, first - 1, end - 1):
        first -= 1
    return range(first, end)


def _of_one_epoch(stream: RankStream, one: int, other: int) -> bool:
    heads = stream.head(one), stream.head(other)
    return heads[0].attempt == heads[1].attempt and heads[0].ranks == heads[1].ranks


def slowest(
    column: str, values: NDArray[np.float32], layout: Layout, most: int, rule: StragglerRule = _RULE
) -> list[RankLateness]:
    """The ``most`` ranks whose numbers are above those of their peers by the largest fraction; those that are slow before all others.

    Args:
        column: What is compared: their computing time, or another of ``RANK_COLUMNS``.
        values: ``(windows, ranks)``; NaN where a rank did not know. Ranks that never knew are left out.
    """
    worth = np.maximum(values, np.float32(LEAST[column]))  # NaN stays
    found = [one for peers in _peers(values, layout) for one in _latest(worth, peers, most, rule)]
    found.sort(key=lambda one: (not one.slow, -one.slowdown, one.rank))
    return found[:most]


def _peers(values: NDArray[np.float32], layout: Layout) -> list[NDArray[np.int64]]:
    """The ranks of each role that know their numbers in every window."""
    role, known = np.array(roles(layout)), ~np.isnan(values).any(0)
    return [np.flatnonzero((role == one) & known) for one in np.unique(role[known])]


def _latest(
    values: NDArray[np.float32], peers: NDArray[np.int64], most: int, rule: StragglerRule
) -> list[RankLateness]:
    mine = values[:, peers].astype(np.float64)  # (windows, peers)
    if not mine.size:
        return []
    late = np.array([lateness(window, rule)[0] for window in mine])  # (windows, peers)
    slower = (late >= rule.slowdown).sum(0)
    late_share = np.where(late >= rule.slowdown, late, 0.0).sum(0) / len(mine)
    usual = np.median(mine, axis=0)
    slowdown, deviations = lateness(usual, rule)
    mostly = slower * rule.windows >= rule.needed * len(mine)
    # One window is the noise of a moment: as many are needed as a fleet needs to replace a straggler.
    slow = (len(mine) >= rule.needed) & mostly & (slowdown >= rule.slowdown) & (deviations >= rule.deviations)
    order = np.lexsort((peers, -slowdown, ~slow))[:most]
    return [
        RankLateness(
            rank=int(peers[one]),
            value=float(usual[one]),
            typical=float(usual[one] / (1 + slowdown[one])),
            slowdown=float(slowdown[one]),
            deviations=float(deviations[one]),
            slower=int(slower[one]),
            windows=len(mine),
            slow=bool(slow[one]),
            late_share=float(late_share[one]),
        )
        for one in order
    ]


def values_of(stream: RankStream, column: str, frames: Sequence[int]) -> NDArray[np.float32]:
    """One column of some frames of equally many ranks, ``(frames, ranks)``."""
    ranks = stream.head(frames[0]).ranks if frames else 0
    return np.array([stream.column(number, column) for number in frames], np.float32).reshape(
        len(frames), ranks
    )

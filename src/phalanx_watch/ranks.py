"""The ranks of a run side by side: their nodes, the orders in which they are drawn, and those that are slower than their peers.

The ranks of a slow node, of a slow switch or of a slow pipeline stage may be far apart by their numbers; in the right order they are one band.

A fleet judges its ranks while it runs, window by window; a run without a fleet has no such check. ``slowest`` compares the newest frames of one
attempt together, by the thresholds that replace stragglers in a fleet. A rank is slow if it was slower than its peers in most windows, and its
median over all of them stands out. With fewer windows than that rule needs, no rank is slow. Several windows reveal more than one on a noisy
machine. Peers are the ranks of one pipeline stage, which do the same work.
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

# The layout is the one that the attempt logged at its start: a fleet that lost nodes may continue with smaller degrees. Nodes
# are those that ``fleet.json`` names now; those of earlier epochs are not stored.


def layout_of_attempt(directory: RunDirectory, attempt: int, ranks: int) -> Layout:
    """Return the layout of an attempt with ``ranks`` ranks, from its newest start, or else from the run file.

    If neither has as many ranks, they are all replicas. Raises ``RunDirectoryError`` or ``EventLogError`` if the
    directory is not that of a run.
    """
    parallel = read_resolved(directory).parallel
    started = newest_event(
        directory.events, lambda event: event.attempt == attempt and isinstance(event.body, RunStarted)
    )
    least = replica_ranks(parallel)
    if started is not None and isinstance(started.body, RunStarted):
        axes = {axis: started.body.layout.get(axis, 1) for axis in Layout().degrees}
        logged = replace(layout_of(parallel, least), **axes)  # events lack the division of experts
        if logged.ranks == ranks and min(axes.values()) >= 1:
            return logged
    planned = layout_of(parallel, ranks) if ranks >= least else Layout()
    return planned if planned.ranks == ranks else Layout(replicate=ranks)


def nodes_of_ranks(directory: RunDirectory, ranks: int) -> dict[int, str]:
    """Return the node of each rank of a fleet that has ``ranks`` ranks now; empty without a fleet or for another number."""
    with suppress(FleetFileError):
        fleet = read_fleet_file(directory.path)
        if fleet.ranks == ranks:
            return {rank: member.name for member in fleet.members for rank in member.ranks}
    return {}


# Orders of drawing.


BY_RANK, BY_NODE = "rank", "node"
_DIGITS = re.compile(r"(\d+)")


def orders(layout: Layout | None, nodes: Mapping[int, str]) -> list[str]:
    """Return the names of the orders that differ for a run."""
    axes = [axis for axis, degree in layout.degrees.items() if degree > 1] if layout else []
    return [BY_RANK, *([BY_NODE] if nodes else []), *(axes if len(axes) > 1 else [])]


def in_order(name: str, ranks: int, layout: Layout | None, nodes: Mapping[int, str]) -> NDArray[np.int64]:
    """Return all ranks in the order ``name``, ``(ranks,)``; those without a node come last. Unknown orders sort by number."""
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
    """Return a sort key by which node-9 comes before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


# Ranks that are slower than their peers.


_RULE = StragglerRule()
LEAST: Mapping[str, float] = {
    "compute_s": 1e-6,
    "data_wait_s": 1e-3,
    "memory_bytes": 2.0**20,
    "temperature_c": 1.0,
}
"""Floor of each column: smaller values are raised to it, so that near-zero waits do not count as late."""


@dataclass(frozen=True)
class RankLateness:
    """One rank compared with its peers, over some windows."""

    rank: int
    value: float
    """Median over the windows."""
    typical: float
    """Lower median of its peers."""
    slowdown: float
    """``value / typical - 1``."""
    deviations: float
    """Slowdown in standard deviations of its peers."""
    slower: int
    """Number of windows in which it exceeded the rule's slowdown."""
    windows: int
    slow: bool
    """True if it was slower in most windows, and its median stands out."""
    late_share: float = 0.0
    """Time that its peers waited for it in its slow windows but the slowest, over their own time in all windows."""


def newest_windows(stream: RankStream, last: int, attempt: int | None = None, least_s: float = 0.0) -> range:
    """Return the indexes of the newest frames, at most ``last``, of an attempt (None: the newest); all have the same
    ranks. There are more than ``last`` if those span less than ``least_s`` seconds.

    Empty if there are none.
    """
    end = len(stream)
    while attempt is not None and end and stream.head(end - 1).attempt != attempt:
        end -= 1
    first = end
    while (
        first
        and _of_one_epoch(stream, first - 1, end - 1)
        and (end - first < last or stream.head(end - 1).t - stream.head(first).t < least_s)
    ):
        first -= 1
    return range(first, end)


def _of_one_epoch(stream: RankStream, first: int, second: int) -> bool:
    """Return True if two frames have the same attempt and number of ranks."""
    heads = stream.head(first), stream.head(second)
    return heads[0].attempt == heads[1].attempt and heads[0].ranks == heads[1].ranks


def slowest(column: str, values: NDArray[np.float32], layout: Layout, most: int) -> list[RankLateness]:
    """Return the ``most`` ranks that exceed their peers by the largest fraction; slow ranks come first.

    Peers have the same role in the layout. Values below ``LEAST`` of the column count as that.

    Args:
        column: Compared column, one of ``RANK_COLUMNS``.
        values: ``(windows, ranks)``; NaN if a rank did not measure. Ranks with a NaN are left out.
    """
    worth = np.maximum(values, np.float32(LEAST[column]))  # NaN stays
    # The ranks of each role that have a value in every window.
    role, complete = np.array(roles(layout)), ~np.isnan(values).any(0)
    groups = [np.flatnonzero((role == number) & complete) for number in np.unique(role[complete])]
    latenesses = [rank for peers in groups for rank in _latest(worth, peers, most)]
    latenesses.sort(key=lambda rank: (not rank.slow, -rank.slowdown, rank.rank))
    return latenesses[:most]


def _latest(values: NDArray[np.float32], peers: NDArray[np.int64], most: int) -> list[RankLateness]:
    """Return the ``most`` ranks of a group of peers that exceed the others most, slow ones first, by the medians over windows."""
    mine = values[:, peers].astype(np.float64)  # (windows, peers)
    if not mine.size:
        return []
    late = np.array([lateness(window, _RULE)[0] for window in mine])  # (windows, peers)
    slower = (late >= _RULE.slowdown).sum(0)
    waits = np.where(late >= _RULE.slowdown, late, 0.0)  # (windows, peers)
    late_share = (waits.sum(0) - waits.max(0)) / len(mine)  # the longest may be a single pause, of all ranks
    usual = np.median(mine, axis=0)
    slowdown, deviations = lateness(usual, _RULE)
    mostly = slower * _RULE.windows >= _RULE.needed * len(mine)
    # A single window may be noise: a straggler's replacement in a fleet needs as many.
    slow = (
        (len(mine) >= _RULE.needed) & mostly & (slowdown >= _RULE.slowdown) & (deviations >= _RULE.deviations)
    )
    order = np.lexsort((peers, -slowdown, ~slow))[:most]
    return [
        RankLateness(
            rank=int(peers[index]),
            value=float(usual[index]),
            typical=float(usual[index] / (1 + slowdown[index])),
            slowdown=float(slowdown[index]),
            deviations=float(deviations[index]),
            slower=int(slower[index]),
            windows=len(mine),
            slow=bool(slow[index]),
            late_share=float(late_share[index]),
        )
        for index in order
    ]


def values_of(stream: RankStream, column: str, frames: Sequence[int]) -> NDArray[np.float32]:
    """Return one column of frames with the same number of ranks, ``(frames, ranks)``."""
    ranks = stream.head(frames[0]).ranks if frames else 0
    return np.array([stream.column(number, column) for number in frames], np.float32).reshape(
        len(frames), ranks
    )

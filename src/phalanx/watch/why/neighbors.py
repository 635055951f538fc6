"""What other readers of a run directory find: ranks that are slower than their peers, machines that differ, the failure that came first.

Each is asked as the command of its own is (``phalanx ranks``, ``phalanx runs show``, ``phalanx logs``). One that cannot answer says nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from textwrap import shorten

from phalanx.observe.event_log import EventLogError
from phalanx.observe.logs.first_failure import what_happened, who
from phalanx.observe.rank_stream import RankStream, RankStreamError
from phalanx.observe.record.machines import machine_differences, newest_machines
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.watch.logs.read import first_failure, read_lines
from phalanx.watch.ranks.seats import layout_of_attempt, nodes_of_ranks
from phalanx.watch.ranks.slowest import RankLateness, newest_windows, slowest, values_of
from phalanx.watch.why.observed import FirstFailureSeen, SlowRankSeen
from phalanx.watch.why.thresholds import BURST_ALONE, BURST_WINDOWS, SLOW_RANK

_WINDOWS = 20
_LEAST_WINDOWS = 5
"""Fewer say more about the start of a run than about a rank."""
_MOST = 5
_MOST_LOOKED_AT = 256
_CUT = 300


def slow_ranks(directory: RunDirectory, attempt: int) -> list[SlowRankSeen]:
    """The ranks of ``attempt`` that were slower than their peers in its newest windows; none of an earlier attempt."""
    with (
        suppress(RankStreamError, RunDirectoryError, EventLogError, OSError, IndexError, ValueError),
        RankStream(directory.ranks) as stream,
    ):
        windows = newest_windows(stream, _WINDOWS)
        if len(windows) < _LEAST_WINDOWS or stream.head(windows[-1]).attempt != attempt:
            return []
        ranks = stream.head(windows[-1]).ranks
        values = values_of(stream, "compute_s", windows)
        layout = layout_of_attempt(directory, attempt, ranks)
        found = slowest("compute_s", values, layout, _MOST_LOOKED_AT)
        worst = max(found, key=lambda rank: rank.late_share, default=None)
        nodes = nodes_of_ranks(directory, ranks)
        return [
            SlowRankSeen(
                one.rank,
                one.slowdown,
                one.value,
                one.windows,
                one.slower,
                stream.head(windows[0]).t,
                nodes.get(one.rank, ""),
                one.late_share,
            )
            for one in found
            if one.slow or (one is worst and _is_late_alone(one, found))
        ][:_MOST]
    return []


def _is_late_alone(worst: RankLateness, ranks: Sequence[RankLateness]) -> bool:
    """True if a rank is late in bursts: often, by much in all, and far more than any other; on a busy machine every rank is late at times."""
    others = max((rank.late_share for rank in ranks if rank is not worst), default=0.0)
    often = worst.slower >= BURST_WINDOWS * worst.windows
    return often and worst.late_share >= SLOW_RANK and worst.late_share >= BURST_ALONE * others


def unlike_machines(directory: RunDirectory) -> list[str]:
    """A sentence on each fact in which the nodes of the newest start differ."""
    with suppress(OSError):
        return [one.sentence for one in machine_differences(newest_machines(directory))]
    return []


def last_line(directory: RunDirectory) -> str:
    """The newest line of the logs of all processes, shortened; empty if there is none."""
    with suppress(OSError, ValueError):
        for line in read_lines(directory, last=1):
            return f"{who(line)}: {shorten(what_happened(line.text), _CUT, placeholder=' ...')}"
    return ""


def failed_first(directory: RunDirectory) -> FirstFailureSeen | None:
    """The first failure by the logs of the newest start; ``None`` if nothing failed."""
    with suppress(OSError, ValueError):
        line = first_failure(directory)
        if line is not None:
            text = shorten(what_happened(line.text), _CUT, placeholder=" ...")
            return FirstFailureSeen(who(line), text, line.t)
    return None

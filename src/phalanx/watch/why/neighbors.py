"""What other readers of a run directory find: ranks that are slower than their peers, machines that differ, the failure that came first.

Each is asked as the command of its own is (``phalanx ranks``, ``phalanx runs show``, ``phalanx logs``). One that cannot answer says nothing here.
"""

from __future__ import annotations

from contextlib import suppress
from textwrap import shorten

from phalanx.observe.event_log import EventLogError
from phalanx.observe.logs.first_failure import what_happened, who
from phalanx.observe.rank_stream import RankStream, RankStreamError
from phalanx.observe.record.machines import machine_differences, newest_machines
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.watch.logs.read import first_failure
from phalanx.watch.ranks.seats import layout_of_attempt, nodes_of_ranks
from phalanx.watch.ranks.slowest import newest_windows, slowest, values_of
from phalanx.watch.why.observed import FirstFailureSeen, SlowRankSeen

_WINDOWS = 20
_LEAST_WINDOWS = 5
"""Fewer say more about the start of a run than about a rank."""
_MOST = 5
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
        found = slowest("compute_s", values, layout_of_attempt(directory, attempt, ranks), _MOST)
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
            )
            for one in found
            if one.slow
        ]
    return []


def unlike_machines(directory: RunDirectory) -> list[str]:
    """A sentence on each fact in which the nodes of the newest start differ."""
    with suppress(OSError):
        return [one.sentence for one in machine_differences(newest_machines(directory))]
    return []


def failed_first(directory: RunDirectory) -> FirstFailureSeen | None:
    """The first failure by the logs of the newest start; ``None`` if nothing failed."""
    with suppress(OSError, ValueError):
        line = first_failure(directory)
        if line is not None:
            text = shorten(what_happened(line.text), _CUT, placeholder=" ...")
            return FirstFailureSeen(who(line), text, line.t)
    return None

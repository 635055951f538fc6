"""Where the ranks of an attempt sit: in which layout, and on which nodes.

The layout is the one that the attempt has told when it began, since a fleet that has lost nodes may go on under smaller degrees. Nodes are those
that ``fleet.json`` names at the moment; of earlier epochs nobody has kept them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.observe.event_log import newest_event
from phalanx.observe.events import RunStarted
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.layout import Layout, layout_of, replica_ranks


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

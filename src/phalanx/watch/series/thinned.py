"""The few events of a run on which its goodput depends, so that it is known at once after a hundred thousand steps.

A step's event carries the ledger up to it, so of many steps in a row the last one tells what they all took, unless a checkpoint, a
restart or a step that was skipped divides them. The steps next to such a place are kept, and read again from the file at their offsets:
``phalanx.observe.ledger.goodput`` then gives exactly what it gives of all events (a test holds it to that).
"""

from __future__ import annotations

import numpy as np

from phalanx.observe.events import CheckpointSaved, Event, Restored, decode
from phalanx.observe.lines.tail import read_lines_at
from phalanx.watch.series.run_series import RunSeries
from phalanx.watch.series.table import Integers

_MOST_WITHOUT_LEDGER = 20_000
_UNREADABLE = (ValueError, RecursionError, OverflowError)


def thinned_events(run: RunSeries) -> list[Event]:
    """The events of a run, in the order written, without steps that change nothing in its accounts. Raises ``OSError``."""
    with run.lock:
        others = list(run.others)
        offsets = run.table.column("offset").astype(np.int64)
        told = _read(run, [offset for _, offset in others])
        rows = _rows(run, [row for row, _ in others], list(told.values()))
    steps = _read(run, offsets[rows].tolist())
    return [event for _, event in sorted((told | steps).items())]


def _read(run: RunSeries, offsets: list[int]) -> dict[int, Event]:
    """The events at the offsets; one that is no longer there is left out."""
    found = {}
    for offset, line in zip(offsets, read_lines_at(run.directory.events, offsets), strict=True):
        try:
            found[offset] = decode(line)
        except _UNREADABLE:
            continue
    return found


def _rows(run: RunSeries, places: list[int], told: list[Event]) -> Integers:
    """The rows that are kept: at the ends of each attempt, beside each event that is no step, and beside each step at which the
    accounts may be divided."""
    count = run.table.rows
    if not count:
        return np.zeros(0, np.int64)
    steps = run.table.column("step").astype(np.int64)
    attempts, times = run.table.column("attempt").astype(np.int64), run.table.column("t").astype(np.float64)
    kept = np.zeros(count, np.bool_)
    kept[np.flatnonzero(~run.table.column("has_ledger").astype(np.bool_))[-_MOST_WITHOUT_LEDGER:]] = True
    at = np.array(places, np.int64)
    kept[np.clip(np.concatenate((at - 1, at)), 0, count - 1)] = True
    broken = np.flatnonzero((steps[1:] <= steps[:-1]) | (attempts[1:] != attempts[:-1])) + 1
    firsts = np.concatenate(([0], broken))
    lasts = np.concatenate((broken, [count])) - 1
    cuts = [event.body.step for event in told if isinstance(event.body, CheckpointSaved | Restored)]
    divisions = np.unique(np.concatenate((np.array(cuts, np.int64), steps[firsts] - 1)))
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        kept[[first, last, first + int(np.argmax(times[first : last + 1]))]] = True
        near = first + np.searchsorted(steps[first : last + 1], divisions)
        kept[np.clip(np.concatenate((near - 1, near, near + 1)), first, last)] = True
    return np.flatnonzero(kept)

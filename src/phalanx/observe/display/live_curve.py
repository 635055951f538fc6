"""Keeps the loss curve of a run up to date while its events are shown, at a small share of one processor.

A drawing reads all events from the file, so that it costs more the longer a run is; the pause to the next is a multiple of what the
last one took. It happens in the process that shows the run and not in one that trains.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.observe.display.curve import CurveError, draw_curve
from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Event, Step

EVERY_S = 30.0
SHARE = 0.02
"""The largest share of the time that is spent on drawing."""


def draw_run(file: Path, curve: Path) -> None:
    """Draw the run in the event file ``file`` to ``curve``; do nothing if it cannot be drawn."""
    with suppress(CurveError, EventLogError, OSError):
        draw_curve(read_events(file), curve)


def keep_drawn(
    events: Iterable[Event],
    file: Path,
    curve: Path,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[Path, Path], None] = draw_run,
) -> Iterator[Event]:
    """Yields ``events``, and draws the run in the event file ``file`` to ``curve`` now and then, by ``draw``.

    If it has drawn at all, it draws once more at the end: a drawing may have come after that of the run itself, with fewer events.
    A drawing that fails is left out.
    """
    due_s, drawn = clock() + EVERY_S, False
    for event in events:
        yield event
        if isinstance(event.body, Step) and clock() >= due_s:
            began_s, drawn = clock(), True
            draw(file, curve)
            now_s = clock()
            due_s = now_s + max(EVERY_S, (now_s - began_s) / SHARE)
    if drawn:
        draw(file, curve)

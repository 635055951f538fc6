"""The points of a run's event stream that a tracker lacks: a process that is killed takes with it what its tracker had not sent.

The stream is the truth and lies in the run directory, so each start sends what is missing. A tracker takes points in order; all before the
newest step that it holds is there, unless its queue was full, which ``phalanx sinks fill`` mends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.observe.event_log import lines_from_the_end
from phalanx.observe.events import Evaluated, Event, Step, decode
from phalanx.run.directory.regular_file import open_regular

_BLOCK_BYTES = 1 << 16
_MOST_LINES = 20_000
"""If more lines are missing, the stream is read from its beginning instead of being kept in memory."""
_KINDS = (b'"kind":"Step"', b'"kind":"Evaluated"')
_SEARCHED = 120
"""In so many first bytes a line of ours has its kind."""


def missing_points(
    path: Path, holds: Callable[[Event], bool], *, most_lines: int = _MOST_LINES
) -> Iterator[Event]:
    """Yield the steps and evaluations that a tracker lacks, in the order written; nothing if the stream cannot be read.

    Args:
        path: The event stream.
        holds: Return True if the tracker has the point of an event.
        most_lines: Largest number of missing lines that are kept in memory.
    """
    with suppress(OSError), open_regular(path) as file:
        lines: list[bytes] = []
        for line in lines_from_the_end(file, _BLOCK_BYTES):
            point = next(_points([line]), None)
            if point is None:
                continue
            if isinstance(point.body, Step) and holds(point):
                break
            lines.append(line)
            if len(lines) > most_lines:
                file.seek(0)
                yield from (point for point in _points(file) if not holds(point))
                return
        yield from (point for point in _points(reversed(lines)) if not holds(point))


def _points(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        if any(kind in line[:_SEARCHED] for kind in _KINDS):
            with suppress(ValueError, RecursionError):
                event = decode(line)
                if isinstance(event.body, Step | Evaluated):
                    yield event

"""The newest words of a run, read from the end of its event file: enough for a row in a list, at the same cost in its third month."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.observe.events import FROM_OUTSIDE, Event, RunStarted, Step, decode

_LOOKS_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""So much of the end is looked at, in turn, until a step is found."""
_HEAD_BYTES = 1 << 18
_UNREADABLE = (ValueError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Newest:
    """The ends of an event file; ``None`` for what was not found."""

    first: Event | None = None
    """The first event that can be read."""
    started: RunStarted | None = None
    """The newest start near the end, else the first one."""
    step: Event | None = None
    """The newest event that is a ``Step``."""
    lived: Event | None = None
    """The newest event that the ranks themselves wrote."""
    last: Event | None = None
    """The newest event of all."""
    size_bytes: int = 0


def newest(path: Path) -> Newest:
    """Looks at the beginning and the end of an event file; it may be missing, torn or no file of events. Raises ``OSError``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return Newest()
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no file", str(path))
        return _look(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def _look(descriptor: int, size: int) -> Newest:
    head = list(_events(os.pread(descriptor, _HEAD_BYTES, 0).split(b"\n")))
    events: list[Event] = []
    for look in _LOOKS_BYTES:
        start = max(0, size - look)
        lines = os.pread(descriptor, size - start, start).split(b"\n")
        events = []
        for event in _events(reversed(lines[1:] if start else lines)):
            events.append(event)
            if isinstance(event.body, Step):
                break
        if start == 0 or any(isinstance(event.body, Step) for event in events):
            break
    starts = [event.body for event in (*events, *head) if isinstance(event.body, RunStarted)]
    return Newest(
        first=head[0] if head else None,
        started=starts[0] if starts else None,
        step=next((event for event in events if isinstance(event.body, Step)), None),
        lived=next((event for event in events if not isinstance(event.body, FROM_OUTSIDE)), None),
        last=events[0] if events else None,
        size_bytes=size,
    )


def _events(lines: Iterator[bytes] | list[bytes]) -> Iterator[Event]:
    for line in lines:
        if line.strip():
            try:
                yield decode(line)
            except _UNREADABLE:
                continue

"""Nodes whose processors are slowed down while a run trains: each leaves a note in the run directory for as long as it lasts.

One process of a node looks every ten seconds, on a thread of its own, and writes ``machines/NODE.throttled`` when there is something to say; the note is
removed when there has been nothing for a while. Nothing is exchanged, and no step waits for it. ``phalanx why`` names the node by its note.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import msgspec

from phalanx.observe.record.machines import place_of
from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory

LOOK_S = 10.0
OVER_S = 60.0
"""A note is removed after so long without anything new; one that is older than twice this was left by a process that is gone."""
_SUFFIX = ".throttled"
_LATEST_S = 1e10
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Throttling:
    """What slows a node down."""

    node: str
    since_s: float
    """Unix seconds, as ``seen_s``."""
    seen_s: float
    """When it was seen last."""
    looks: int
    """Looks in which it was seen, since then."""
    what: tuple[str, ...]


class ThrottlingWatch:
    """Looks at this machine again and again, until it is closed or the process ends."""

    def __init__(
        self,
        directory: RunDirectory,
        node: str,
        look: Callable[[], list[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``look`` says in sentences what slows this machine down (``phalanx.hardware.local.throttle.Throttles.now``)."""
        self._look = look
        self._place, self._node, self._clock = place_of(directory, node).with_suffix(_SUFFIX), node, clock
        self._note: Throttling | None = None
        self._over = threading.Event()

    def start(self) -> Self:
        """Looks on a thread from now on."""
        threading.Thread(target=self._watch, name="throttling", daemon=True).start()
        return self

    def close(self) -> None:
        """Looks no more; what was noted stays until it is old."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self.once()
            except Exception:  # a driver or a disk in trouble: the run is not, and the next look may do
                _LOG.debug("whether this machine is throttled is not known", exc_info=True)
            self._over.wait(LOOK_S)

    def once(self) -> None:
        """One look. Raises ``OSError`` if the note cannot be written."""
        what, now = self._look(), self._clock()
        note = self._note
        if what:
            since_s, looks = (note.since_s, note.looks) if note else (now, 0)
            if note is None:
                _LOG.warning("this machine is slowed down: %s", "; ".join(what))
            self._note = Throttling(self._node, since_s, now, looks + 1, tuple(what))
            self._place.parent.mkdir(exist_ok=True)
            write_atomically(self._place, msgspec.json.encode(asdict(self._note)), durable=False)
        elif note is not None and now - note.seen_s > OVER_S:
            self._note = None
            self._place.unlink(missing_ok=True)


def read_throttling(directory: RunDirectory, now: float) -> list[Throttling]:
    """The nodes that are slowed down at ``now``; notes that cannot be read, or are old, are left out."""
    found = []
    with suppress(OSError):
        for path in sorted(Path(directory.machines).glob(f"*{_SUFFIX}")):
            with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                note = msgspec.json.decode(read_small(path, 1 << 16), type=Throttling)
                times = note.since_s, note.seen_s
                possible = all(0 <= t < _LATEST_S for t in times) and now - note.seen_s <= 2 * OVER_S
                if possible and note.what:
                    found.append(note)
    return found

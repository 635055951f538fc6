"""Write records into a process's log: with time and place, without secrets, and no more of them than a process may write.

Below: the bound on output, and the process's place in its run (rank, epoch, step), in memory that its parent reads too.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import UNSET

from phalanx.observe.logs.assemble import Record
from phalanx.observe.logs.line import Level, LogLine, encode
from phalanx.observe.logs.log_file import LogFile, LogOrder
from phalanx.observe.logs.masking import SecretMask
from phalanx.run.directory.files import read_small

_TOKEN_FILES = ("fleet.token", "fleet.operator-token")
_TOKEN = re.compile(r"[0-9A-Za-z_-]{16,}")
_LOOK_S = 5.0
_LOUD = ("Traceback", "Fatal", "FATAL", "Error", "ERROR", "error:", "WARN")


class Recorder:
    """The one writer of a log. Nothing that it does raises, and no line of it is held back."""

    def __init__(
        self,
        order: LogOrder,
        path: Path,
        mask: SecretMask,
        place: Place,
        on_trouble: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self._order, self._mask, self._place = order, mask, place
        self._file = LogFile(path, order.bounds, self._lost, on_trouble)
        self._bucket, self._reserve = LineBucket(), LineBucket(256 << 10, 1 << 20)
        self._left_out, self._left_out_bytes = 0, 0
        self._looked_s, self._seen = 0.0, dict[str, int]()

    def put(self, record: Record) -> None:
        """Write a record, or leave it out and count it if there are too many; errors have a reserve."""
        text = record.text
        if self.has_room(len(text) + PER_LINE, loud=record.level == "error"):
            self.write(record)
        else:
            self.leave_out(1, len(text))

    def has_room(self, nbytes: int, *, loud: bool = False) -> bool:
        """True if so much text may come now; then it is counted as having come. What is ``loud`` has a reserve of its own."""
        return self._bucket.takes(nbytes) or (loud and self._reserve.takes(nbytes))

    def floods(self, text: str) -> bool:
        """Return True if a text that is no error exceeds the rate."""
        return not self._bucket.has(len(text)) and not any(word in text for word in _LOUD)

    def write(self, record: Record) -> None:
        """Write a record, masked, however many there are; before it, the count of those left out."""
        if self._left_out:
            self._tell_left_out()
        self._learn_tokens()
        self._file.write(self._line(self._mask(record.text), record.level, goes_on=record.goes_on))

    def leave_out(self, lines: int, nbytes: int) -> None:
        """Count lines that are not to be written; the next line reports the count."""
        self._left_out += lines
        self._left_out_bytes += nbytes

    def close(self) -> None:
        """Write the count of lines that were left out, and close the file; it is opened again by a later line."""
        if self._left_out:
            self._tell_left_out()
        self._file.close()

    def _tell_left_out(self) -> None:
        lines, nbytes = self._left_out, self._left_out_bytes
        self._left_out = self._left_out_bytes = 0
        text = f"{lines:,} lines ({nbytes:,} bytes) are left out here: this process says more than its log takes in"
        self._file.write(self._line(text, "warning"))

    def _lost(self, lines: int, reason: str) -> bytes:
        return self._line(f"{lines:,} lines are lost here: {reason}", "warning")

    def _line(self, text: str, level: Level, *, goes_on: bool = False) -> bytes:
        order, place = self._order, self._place
        return encode(
            LogLine(
                *(
                    round(time.time(), 6),
                    level,
                    order.node,
                    place.rank,
                    place.epoch,
                    order.attempt,
                    place.step,
                    text,
                ),
                process=order.process,
                goes_on=goes_on or UNSET,
            )
        )

    def _learn_tokens(self) -> None:
        """Mask the tokens in the run directory's files, which may be made or changed while it runs. Looks at intervals."""
        now_s = time.monotonic()
        if now_s < self._looked_s:
            return
        self._looked_s = now_s + _LOOK_S
        for name in _TOKEN_FILES:
            path = self._order.run_dir / name
            with suppress(OSError):
                changed_ns = path.stat().st_mtime_ns
                if self._seen.get(name) != changed_ns:
                    self._seen[name] = changed_ns
                    self._mask.add(*_TOKEN.findall(read_small(path).decode(errors="replace")))


# Bounds what a process that says too much costs: a bucket of bytes that fills again with time.
#
# A process may say much at once (a start, a listing), and little for ever. What goes beyond is left out and counted; errors never are.


PER_LINE = 200
"""Bytes that a line costs beside its text."""


class LineBucket:
    """Token bucket: ``per_s`` bytes a second pass, and ``most`` at once."""

    def __init__(
        self, per_s: float = 2 << 20, most: float = 8 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._most, self._clock = per_s, most, clock
        self._left, self._at_s = float(most), clock()

    def takes(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` may pass, and take them out."""
        if not self.has(nbytes):
            return False
        self._left -= nbytes
        return True

    def has(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` might pass now; the bucket fills with time."""
        if self._left < nbytes:
            now_s = self._clock()
            self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        return self._left >= nbytes


# Where a process is in its run, for the lines of its log: rank, epoch and step, in memory that its parent sees too.
#
# A rank sets its step with one store. The launcher or agent that reads what native code in it prints looks here for the rank and step of
# those lines, and finds them also after the rank was killed. The descriptor is inherited; a process without one has a place of its own.


_NAMES = ("rank", "epoch", "step")
_BYTES = 8 * len(_NAMES)
_UNKNOWN = -(2**63)


class Place:
    """Rank, epoch and step of a process; ``None`` is not known, or none."""

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of a place that another process made; it stays the caller's. Raises ``OSError`` or ``ValueError`` if it is none."""
        self._shared = None if descriptor is None else mmap.mmap(descriptor, _BYTES)
        self._values = memoryview(self._shared or bytearray(_BYTES)).cast("q")
        if descriptor is None:
            self.rank = self.epoch = self.step = None

    @classmethod
    def shared(cls) -> tuple[Place, int]:
        """Return a new place, empty, and the descriptor by which a child process gets it; the caller closes that. Raises ``OSError``."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("phalanx-place", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, _BYTES)
            place = cls(descriptor)  # the mapping has a descriptor of its own, and there may be none left
        except BaseException:
            os.close(descriptor)
            raise
        place.rank = place.epoch = place.step = None
        return place, descriptor

    def close(self) -> None:
        """Release the shared memory; the place is not used any more."""
        self._values.release()
        if self._shared is not None:
            self._shared.close()

    def _get(self, index: int) -> int | None:
        value = self._values[index]
        return None if value == _UNKNOWN else value

    @property
    def rank(self) -> int | None:
        """The rank that the process holds."""
        return self._get(0)

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._values[0] = _UNKNOWN if value is None else value

    @property
    def epoch(self) -> int | None:
        """The epoch of the fleet that it is in."""
        return self._get(1)

    @epoch.setter
    def epoch(self, value: int | None) -> None:
        self._values[1] = _UNKNOWN if value is None else value

    @property
    def step(self) -> int | None:
        """The step that it computes."""
        return self._get(2)

    @step.setter
    def step(self, value: int | None) -> None:
        self._values[2] = _UNKNOWN if value is None else value

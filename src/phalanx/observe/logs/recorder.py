"""Writes records into a process's log: with time and place, without secrets, and no more of them than the process may say."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import UNSET

from phalanx.observe.logs.assemble import Record
from phalanx.observe.logs.flood import PER_LINE, Bucket
from phalanx.observe.logs.line import Level, LogLine, encode
from phalanx.observe.logs.log_file import LogFile
from phalanx.observe.logs.masking import Mask
from phalanx.observe.logs.order import LogOrder
from phalanx.observe.logs.place import Place
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
        mask: Mask,
        place: Place,
        on_trouble: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self._order, self._mask, self._place = order, mask, place
        self._file = LogFile(path, order.bounds, self._lost, on_trouble)
        self._bucket, self._reserve = Bucket(), Bucket(256 << 10, 1 << 20)
        self._left_out, self._left_out_bytes = 0, 0
        self._looked_s, self._seen = 0.0, dict[str, int]()

    def put(self, record: Record) -> None:
        """Writes a record, or leaves it out if there are too many."""
        text = record.text
        if self.has_room(len(text) + PER_LINE, loud=record.level == "error"):
            self.write(record)
        else:
            self.leave_out(1, len(text))

    def has_room(self, nbytes: int, *, loud: bool = False) -> bool:
        """True if so much text may come now; then it is counted as having come. What is ``loud`` has a reserve of its own."""
        return self._bucket.takes(nbytes) or (loud and self._reserve.takes(nbytes))

    def floods(self, text: str) -> bool:
        """True if a text that says nothing of an error is more than may come now."""
        return not self._bucket.has(len(text)) and not any(word in text for word in _LOUD)

    def write(self, record: Record) -> None:
        """Writes a record, however many there are."""
        if self._left_out:
            self._tell_left_out()
        self._learn_tokens()
        self._file.write(self._line(self._mask(record.text), record.level, goes_on=record.goes_on))

    def leave_out(self, lines: int, nbytes: int) -> None:
        """Counts lines that are not to be written, which the next line then tells."""
        self._left_out += lines
        self._left_out_bytes += nbytes

    def close(self) -> None:
        """Tells what was left out, and closes the file; it is opened again by a later line."""
        if self._left_out:
            self._tell_left_out()
        self._file.close()

    def _tell_left_out(self) -> None:
        lines, nbytes = self._left_out, self._left_out_bytes
        self._left_out = self._left_out_bytes = 0
        text = f"{lines:,} lines ({nbytes:,} bytes) are left out here: this process says more than its log takes in"
        self._file.write(self._line(text, "warning"))

    def _lost(self, lines: int, why: str) -> bytes:
        return self._line(f"{lines:,} lines are lost here: {why}", "warning")

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
        """Learns the run's tokens, which may be made or changed while it runs."""
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

"""Make records of the output of a process: a line each, but for what belongs together, such as a traceback.

Text comes in pieces of any length, with or without newlines. What belongs together and ends by itself (a traceback, by the line that names
the exception) is handed out as soon as it has ended; what only ends when something else begins (native stack frames, a crash report of
``faulthandler``) also by ``settle``, which the caller calls at a pause. Nothing grows without bound: a long line is cut.

Colors are removed and other control characters escaped, so that a log can be shown on a terminal whatever a program has printed; of a line
that was drawn over and over (a progress bar) the last drawing counts.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from phalanx.observe.logs.line import Level, level_of

MOST = 32 << 10
"""Most characters of a record."""
_COLOR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
_RANKED = re.compile(r"\[rank\d+\]:\s?")
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)? ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TRACE, _CRASH, _FRAMES, _KEY = "trace", "crash", "frames", "key"
_CRASH_LINES = (
    "Thread 0x",
    "Current thread",
    "Extension modules",
    "Python runtime state",
    "Current thread's C stack",
    "Stack (most recent",
)
_BEGINS = frozenset("T[ FW-")
"""First letters of lines that may begin a record of several lines."""
_FRAME_LINES = ("Exception raised from", "frame #", "C++ CapturedTraceback", "#")


class Record(NamedTuple):
    """Text that a process wrote at once."""

    text: str
    level: Level
    goes_on: bool = False


class Assembler:
    """Turns pieces of text into records. ``add`` and ``settle`` return those that are complete."""

    def __init__(self) -> None:
        """Begin without text."""
        self._partial = ""
        self._cut = False
        """The record of a line that has not ended was handed out; the rest of it continues."""
        self._skipping = False
        """The rest of a line that was too long is left out."""
        self._kind = ""
        self._open_lines: list[str] = []
        self._held_characters = 0
        self._held_goes_on = False
        self._after_trace = False

    @property
    def waits(self) -> bool:
        """True if ``settle`` has something to hand out."""
        return bool(self._partial or self._open_lines)

    def add(self, text: str) -> list[Record]:
        """Take a piece of text and return the records that it completes, which a traceback in progress delays.

        A line that exceeds ``MOST`` before its end has come is given at once as one record, shortened; its rest
        is dropped.
        """
        records: list[Record] = []
        *ended, rest = text.split("\n")
        for line in ended:
            self._end_line(self._partial + line, records)
            self._partial = ""
        if not self._skipping:
            self._partial += rest
            if len(self._partial) > MOST:
                self._give_partial(records)
                self._skipping = True
        return records

    def release(self) -> list[Record]:
        """Return the record that is complete but might continue, such as a traceback."""
        records: list[Record] = []
        self._close(records)
        return records

    def settle(self) -> list[Record]:
        """Return all that waits, also a line that has not ended: nothing more may come."""
        records = self.release()
        if self._partial:
            self._give_partial(records)
        return records

    def take_partial(self) -> str:
        """Return the line that has not ended, and drop it here."""
        partial, self._partial = self._partial, ""
        return partial

    def _give_partial(self, records: list[Record]) -> None:
        self._close(records)
        self._give(self._partial, records, goes_on=self._cut)
        self._partial, self._cut = "", True

    def _end_line(self, line: str, records: list[Record]) -> None:
        """Process a line that has ended: clean it and pass it to ``_line``.

        Of a line that was too long, drop the rest. If its beginning was given already, give the rest as its
        continuation.
        """
        skipped, cut = self._skipping, self._cut
        self._skipping = self._cut = False
        if skipped:
            return
        if cut:
            if line.strip():
                self._give(line, records, goes_on=True)
            return
        self._line(clean(line), records)

    def _line(self, line: str, records: list[Record]) -> None:
        """Add a cleaned line: to the open traceback, crash or key if it belongs there, else close that.

        Otherwise it begins such a record, or is one of its own; blank ones are dropped.
        """
        if not self._kind and not self._after_trace and line[:1] not in _BEGINS:
            if line.strip():
                self._give(line, records)
            return
        bare = _RANKED.sub("", line, count=1) if line.startswith("[rank") else line
        if self._kind and self._belongs(bare):
            self._hold(line)
            if self._ends(bare):
                self._close(records)
            return
        self._close(records)
        after, self._after_trace = self._after_trace, False
        # matched text: Python prints it
        if bare.startswith(("Traceback (most recent call last)", "  + Exception Group Traceback")):
            self._begin(_TRACE, line)
        elif after and bare in _CHAINED:
            self._begin(_TRACE, line, goes_on=True)
        elif after and not bare:
            self._after_trace = True  # a blank line between two exceptions of a chain
        elif after and bare.startswith(_FRAME_LINES):
            self._begin(_FRAMES, line, goes_on=True)
        elif bare.startswith(("Fatal Python error:", "Windows fatal exception:")):
            self._begin(_CRASH, line)
        elif bare.startswith("-----BEGIN ") and "PRIVATE KEY" in bare:
            self._begin(_KEY, line)
        elif bare.strip():
            self._give(line, records)

    def _belongs(self, line: str) -> bool:
        """Return True if a line continues the open record, by the record's kind."""
        if self._kind == _KEY:
            return True
        if self._kind == _FRAMES:
            return line.startswith(_FRAME_LINES)
        if self._kind == _CRASH:
            return not line or line[0].isspace() or line.startswith(_CRASH_LINES)
        return (
            not line
            or line[0].isspace()
            or line.startswith(("Traceback (most", *_CHAINED))
            or self._ends(line)
        )

    def _ends(self, line: str) -> bool:
        """Return True if a line is the last one of the open record: a traceback's exception, or the end of a key.

        Crashes and frames have no last line of their own.
        """
        if self._kind == _KEY:
            return line.startswith("-----END")
        return (
            self._kind == _TRACE
            and bool(line)
            and _EXCEPTION.match(line) is not None
            and line not in _CHAINED
        )

    def _begin(self, kind: str, line: str, *, goes_on: bool = False) -> None:
        self._kind, self._held_goes_on = kind, goes_on
        self._hold(line)

    def _hold(self, line: str) -> None:
        """Add a line to the open record. Beyond ``4 * MOST`` characters, replace the lines of its first half but
        the first by "...".

        The innermost frames come last and matter most.
        """
        self._open_lines.append(line)
        self._held_characters += len(line) + 1
        if self._held_characters > 4 * MOST:
            half = len(self._open_lines) // 2
            self._held_characters -= sum(len(line) + 1 for line in self._open_lines[1:half])
            del self._open_lines[1:half]
            self._open_lines[1:1] = ["  ..."]

    def _close(self, records: list[Record]) -> None:
        """Append the open record to ``records``, if there is one: at level error, or info for a private key."""
        if not self._open_lines:
            return
        text, kind = "\n".join(self._open_lines).rstrip("\n"), self._kind
        self._open_lines, self._held_characters, self._kind = [], 0, ""
        self._after_trace = kind in (_TRACE, _FRAMES)
        level: Level = "info" if kind == _KEY else "error"
        records.append(Record(shortened(text), level, self._held_goes_on))

    def _give(self, line: str, records: list[Record], *, goes_on: bool = False) -> None:
        """Append a line as a record, without the time at its beginning, at the level that its words imply. Blank
        ones are dropped.
        """
        text = shortened(clean(line))
        if match := _TIME.match(text):
            text = text[match.end() :]  # the record has its own
        if text.strip():
            records.append(Record(text, level_of(text), goes_on))


def clean(line: str) -> str:
    """Return a line as a terminal would show it last: text after the last carriage return, without colors, and
    shortened.

    Other control characters are escaped. A line that is printable is returned as it is.
    """
    if line.isprintable():
        return line
    line = line.rstrip("\r")
    if "\r" in line:
        line = line.rpartition("\r")[2]
    line = shortened(_COLOR.sub("", line))
    return "".join(c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in line)


def shortened(text: str) -> str:
    """Return the text; if it is longer than ``MOST`` characters, its beginning (a quarter of that) and its end (the
    rest).

    The number of characters left out stands between them.
    """
    if len(text) <= MOST:
        return text
    head, tail = text[: MOST // 4], text[-3 * MOST // 4 :]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters are left out here ...\n{tail}"

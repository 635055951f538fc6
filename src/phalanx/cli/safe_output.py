"""Standard output and standard error of a command, without control sequences of strangers.

Names of runs, files, nodes and metrics, and texts of logs and errors, may hold sequences that command a terminal. Every command prints through the
streams here, which write a control character as its escape. What passes is what commands print themselves: line breaks, tabs, a carriage return
before a line of progress, and the colors of ``click.style``. Consoles of rich have their own filter (``safe_console``), since they move the cursor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, those that turn the direction of writing, and bytes that are no text."""
_STYLE = re.compile("(\x1b\\[(?:[012]|3[1-6])m)")
"""A color, bold, dim, and their end, as ``click.style`` writes them."""


def printable(text: str) -> str:
    """Return ``text`` with its control characters as escapes, such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SafeStream:
    """A text stream that writes control characters as escapes."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, text: str) -> int:
        """Write ``text``; return its length."""
        start, rest = ("\r", text[1:]) if text.startswith("\r") else ("", text)
        # Every second part is a style.
        parts = _STYLE.split(rest)
        parts[::2] = map(printable, parts[::2])
        self.raw.write(start + "".join(parts))
        return len(text)


@contextmanager
def safe_output() -> Iterator[None]:
    """Within, standard output and standard error are safe streams."""
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, SafeStream):
        yield
        return
    safe = SafeStream(before[0]), SafeStream(before[1])
    sys.stdout, sys.stderr = (cast("TextIO", stream) for stream in safe)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream that ``stream`` writes to, past its filter."""
    return stream.raw if isinstance(stream, SafeStream) else stream


def data_output() -> TextIO:
    """Return the stream for text that is data: standard output as it is, unless that is a terminal."""
    return sys.stdout if sys.stdout.isatty() else unfiltered(sys.stdout)

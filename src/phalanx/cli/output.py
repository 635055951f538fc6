"""Output of commands: text streams and consoles that escape control sequences in foreign text, and numbers as
text for people.

Names of runs, files, nodes and metrics, and texts of logs and errors, may hold sequences that control a
terminal. Every command prints through the streams here, which write a control character as its escape. The
commands' own sequences pass: line breaks, tabs, a carriage return before a line of progress, and the colors
of ``click.style``. Consoles of rich have a filter of their own, since they move the cursor. rich is imported
with the first console.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import click

from phalanx.observe.throughput import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from phalanx.train.compare.observation import Compared


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, those that change the writing direction, and bytes that are no
text."""
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
        """Write ``text`` with control characters as escapes, except styles and a leading carriage return; return
        its length.
        """
        start, body = ("\r", text[1:]) if text.startswith("\r") else ("", text)
        # Every second part is a style.
        parts = _STYLE.split(body)
        parts[::2] = map(printable, parts[::2])
        self.raw.write(start + "".join(parts))
        return len(text)


@contextmanager
def safe_output() -> Iterator[None]:
    """Context in which standard output and standard error are safe streams; nested, it changes nothing."""
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


# The console of all commands. It prints text unchanged: brackets in a run's name or a library's error are no
# markup. Styles are separate arguments: ``console.print(line, style="dim")`` or ``Text.assemble(("stopped",
# "yellow"), reason)``.


def text_console(
    *, stderr: bool = False, file: TextIO | None = None, soft_wrap: bool = False, highlight: bool = False
) -> Console:
    """Return a console without markup and emoji codes, which writes control characters in texts as escapes.

    It writes to ``file``, else to standard output, or with ``stderr`` to standard error.
    """
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Console that writes control characters in texts as escapes; the console's own control codes pass."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            """Yield the segments of ``renderable``."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

        @property
        def file(self) -> IO[str]:
            """The stream to write to, which lets control codes pass."""
            return unfiltered(cast("TextIO", super().file))

        @file.setter
        def file(self, stream: IO[str]) -> None:
            self._file = stream

    return SafeConsole(
        stderr=stderr, file=file, soft_wrap=soft_wrap, highlight=highlight, markup=False, emoji=False
    )


# Numbers, sizes, ages and the differences of two replays, as text for people.


def share(value: float) -> str:
    """Format a fraction in percent."""
    return f"{value:.1%}"


def utilization(value: float) -> str:
    """Format MFU in percent, and mark a value above the measured peak: the machine was busier when that was
    measured at the run's start.
    """
    return share(value) + ("!" if value > 1 else "")


ABOVE_PEAK = "mfu!: above the measured peak, so other work slowed that measurement when the run began"


def age(seconds: float) -> str:
    """Format how long ago something was, in the largest unit: "3 h ago"."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def moment(unix_s: float) -> str:
    """Format a point in time by the clock of this machine, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def size(count: int) -> str:
    """Format a number of bytes in powers of 1024: "512 bytes", "1.5 KiB", up to TiB."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"


_PROGRESS_PAUSE_S = 1.0


def byte_progress(action: str) -> Callable[[int, int], None]:
    """Return a callback (bytes done, bytes of all) that prints progress, rate and time left to standard error, once
    a second.

    The end is always printed.
    """
    begin = last = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _PROGRESS_PAUSE_S and done < of:
            return
        last = now
        rate = done / max(now - begin, 1e-9)
        remaining = f", {(of - done) / rate:,.0f} s left" if 0 < done < of else ""
        click.echo(
            f"{action}: {format_bytes(done)} of {format_bytes(of)}, {format_bytes(rate)}/s{remaining}",
            err=True,
        )

    return show


# Differences of two replays as lines of text.

MOST = 8
"""Number of tensors and modules that are listed; the others are counted."""


def number_text(value: float | None) -> str:
    """Format a number with all of its bits, in decimals and in hexadecimal."""
    return "none" if value is None else f"{value!r} ({float(value).hex()})"


def left_out_lines(compared: Compared) -> Iterator[str]:
    """Yield one line with the modules that two replays could not be compared in, each once; nothing if there are none.

    The line names the first ``MOST``, then the number of the others.
    """
    # A module in lanes is called once for each, and may have several results; the line lists the module once.
    names = list(
        dict.fromkeys(re.sub(r"( \(call \d+\))?(\[\d+\])?$", "", name) for name in compared.left_out)
    )
    if names:
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        yield f"not compared, because the layouts cut it differently: {', '.join(names[:MOST])}{more}"

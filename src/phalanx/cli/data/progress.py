"""How far a preparation is: bytes of the files or tasks, and time left, on one line of a terminal or on lines of a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from phalanx.data.preparing.files import Files

_TERMINAL_PAUSE_S = 0.2
_LOG_PAUSE_S = 5.0
_RATE_AFTER_S = 1.0
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class PrepareProgress:
    """Shows each stage as it goes on, called with (stage, done, in all); as a context manager it ends its line."""

    def __init__(self, files: Files | None = None, *, quiet: bool = False) -> None:
        """``files``: Whose bytes are shown in place of what is done of a stage."""
        self._files, self._quiet = files, quiet
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._stage_start_s = self._last_s = time.monotonic()
        self._done_at_start = 0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end_line()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage != self._stage:
            self._end_line()
            self._stage, self._stage_start_s, self._last_s = stage, now_s, now_s
            self._done_at_start = done
        pause_s = _TERMINAL_PAUSE_S if self._terminal else _LOG_PAUSE_S
        if not self._quiet and (done in (0, total) or now_s - self._last_s >= pause_s):
            self._last_s = now_s
            self._show(self._line(done, total, now_s - self._stage_start_s))

    def _end_line(self) -> None:
        """End the line that is being written on a terminal."""
        if self._width:
            click.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, elapsed_s: float) -> str:
        if self._files is not None:
            return f"{self._stage}: {in_words(self._files.report.bytes_done, self._files.bytes_in_all, elapsed_s)}"
        if not total:
            return f"{self._stage}: {done:,}"
        newly = done - self._done_at_start
        left_s = elapsed_s / newly * (total - done) if newly else 0.0
        return f"{self._stage}: {done:,} of {total:,}" + (
            f", {_duration(left_s)} left" if left_s >= 1 else ""
        )

    def _show(self, line: str) -> None:
        if not self._terminal:
            click.echo(line, err=True)
            return
        click.echo("\r" + line.ljust(self._width), err=True, nl=False)
        self._width = len(line)


def in_words(done: int, in_all: int, elapsed_s: float) -> str:
    """Such as "1.2 of 4.0 GB, 35 MB/s, 80 s left": bytes done of all, after so many seconds."""
    unit, size = next(((name, size) for name, size in _UNITS if in_all >= size), ("bytes", 1))
    digits = 0 if size == 1 else 1
    text = f"{done / size:.{digits}f} of {in_all / size:.{digits}f} {unit}"
    if elapsed_s < _RATE_AFTER_S or not done:
        return text
    rate = done / elapsed_s
    left = f", {_duration((in_all - done) / rate)} left" if done < in_all else ""
    return f"{text}, {rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s{left}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

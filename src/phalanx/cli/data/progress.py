"""How far a preparation is: bytes of the files, rate and time left, on one line of a terminal or on lines of a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.data.preparing.files import Files

_TERMINAL_PAUSE_S = 0.2
_LOG_PAUSE_S = 5.0
_RATE_AFTER_S = 1.0
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class PrepareProgress:
    """Shows each stage as it goes on; given to ``prepare`` as ``on_progress``."""

    def __init__(self, files: Files | None) -> None:
        self._files = files
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._stage_start_s = self._last_s = time.monotonic()
        self._width = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._stage_start_s, self._last_s = stage, now_s, now_s
        pause_s = _TERMINAL_PAUSE_S if self._terminal else _LOG_PAUSE_S
        if done == total or now_s - self._last_s >= pause_s:
            self._last_s = now_s
            self._show(self._line(done, total, now_s - self._stage_start_s))

    def close(self) -> None:
        """Ends the line that is being written on a terminal."""
        if self._width:
            click.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, elapsed_s: float) -> str:
        if self._files is None:
            return f"{self._stage}: {done:,} of {total:,}" if total else f"{self._stage}: {done:,}"
        read, in_all = self._files.report.bytes_done, self._files.bytes_in_all
        return f"{self._stage}: {in_words(read, in_all, elapsed_s)}"

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
    left_s = (in_all - done) / rate
    left = (
        f"{left_s:.0f} s"
        if left_s < 100
        else f"{left_s / 60:.0f} min"
        if left_s < 6000
        else f"{left_s / 3600:.1f} h"
    )
    return f"{text}, {rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s" + (
        f", {left} left" if done < in_all else ""
    )

"""A console of rich whose texts cannot command the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from phalanx.cli.safe_output import printable, unfiltered


class SafeConsole(Console):
    """Writes control characters in texts as escapes; the console's own control codes pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
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

"""The console of all commands. It prints text as it is: brackets in a run's name or a library's error are no markup.

Styles are given beside the text: ``console.print(line, style="dim")`` or ``Text.assemble(("stopped", "yellow"), reason)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from phalanx.cli.safe_output import printable, unfiltered

if TYPE_CHECKING:
    from rich.console import Console


# A console of rich whose texts cannot command the terminal.


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


def text_console(
    *, stderr: bool = False, file: TextIO | None = None, soft_wrap: bool = False, highlight: bool = False
) -> Console:
    """Return a console without markup and without emoji codes; ``file`` instead of stdout or stderr."""
    from phalanx.cli.text_console import SafeConsole

    return SafeConsole(
        stderr=stderr, file=file, soft_wrap=soft_wrap, highlight=highlight, markup=False, emoji=False
    )

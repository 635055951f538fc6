"""The console of all commands. It prints text as it is: brackets in a run's name or a library's error are no markup.

Styles are given beside the text: ``console.print(line, style="dim")`` or ``Text.assemble(("stopped", "yellow"), reason)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def text_console(
    *, stderr: bool = False, file: TextIO | None = None, soft_wrap: bool = False, highlight: bool = False
) -> Console:
    """Return a console without markup and without emoji codes; ``file`` instead of stdout or stderr."""
    from phalanx.cli.safe_console import SafeConsole

    return SafeConsole(
        stderr=stderr, file=file, soft_wrap=soft_wrap, highlight=highlight, markup=False, emoji=False
    )

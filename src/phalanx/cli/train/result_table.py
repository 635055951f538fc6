"""The closing table of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from phalanx.run.directory.paths import RunDirectory
from phalanx.run.directory.result import RunResult

_ABOVE = " (above the measured peak: other work slowed that measurement when the run began)"


def result_table(result: RunResult, directory: RunDirectory, program: Sequence[str] = ("phalanx",)) -> Table:
    """The figures by which runs are compared, in two columns, and the command that shows them beside other runs'.

    ``program`` are the words by which this program is called.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in _rows(result, directory):
        table.add_row(label, value)
    table.add_row("see all of it", page_command(directory, program))
    return table


def page_command(directory: RunDirectory, program: Sequence[str]) -> str:
    """The command that opens the page over the folder in which the run lies; that folder goes without saying where it is the usual one."""
    folder = directory.path.parent
    usual = folder.resolve() == (Path.cwd() / "runs").resolve()
    return shlex.join([*program, "ui", *([] if usual else [str(folder)])])


def _rows(result: RunResult, directory: RunDirectory) -> Iterator[tuple[str, str]]:
    if result.bits_per_byte is not None:
        text = f"{result.bits_per_byte:.3f} bits per byte"
        if result.xz_bits_per_byte is not None:
            text += f" (xz -9 reaches {result.xz_bits_per_byte:.3f} on the same text)"
        yield "held-out text", text
    if result.tokens_per_s and result.mfu is not None:
        yield (
            "speed",
            f"{result.tokens_per_s:,.0f} tokens/s, MFU {result.mfu:.1%} of {result.peak_source}{_ABOVE if result.mfu > 1 else ''}",
        )
    yield "run directory", str(directory.path)
    yield "loss curve", str(directory.curve)
    yield "weights", f"sha256 {result.weights_sha256}"

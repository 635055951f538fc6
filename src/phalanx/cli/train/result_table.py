"""The closing table of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from phalanx.run.directory.paths import RunDirectory, RunResult
from phalanx.run.rules import Comparison

_ABOVE = " (above the measured peak: other work slowed that measurement when the run began)"


_COMPARED = {
    "equal": (
        ("equal", "green"),
        " to the hash in the run file: this machine computes what others have computed",
    ),
    "different": (
        ("different", "red"),
        " from the hash in the run file: please report it with the file record.json of the run directory",
    ),
    "not expected": (("not compared", ""), ": the run file has no hash for this run on this dataset"),
}


def result_table(
    result: RunResult,
    directory: RunDirectory,
    program: Sequence[str] = ("phalanx",),
    comparison: Comparison | None = None,
) -> Table:
    """The figures by which runs are compared, in two columns, and the command that shows them beside other runs'.

    ``program`` are the words by which this program is called, ``comparison`` is that with the weights that the run file expects.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in _rows(result, directory):
        table.add_row(label, value)
    if comparison is not None:
        run = f" ({directory.path.name})" if comparison == "not expected" else ""
        table.add_row("expected", Text.assemble(*_COMPARED[comparison], run))
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

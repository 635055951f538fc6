"""``phalanx runs compare``: several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import demand_folder, explained
from phalanx.cli.output import ABOVE_PEAK, number_text, share, utilization
from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.runs.compare import Comparison, compare

_LONGEST = 64


@click.command("compare", short_help="Settings, environment, results and bits of runs side by side.")
@click.argument("run_dirs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(run_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Set the runs in RUN_DIRS side by side: settings and environment that differ, results, and whether they must have the same bits.

    What they logged is compared number by number, bit by bit; checkpoints and causes are for phalanx diff RUN_A RUN_B.

    \b
      phalanx runs compare runs/a runs/b
      phalanx runs compare runs/sweep-* --json
    """
    for path in run_dirs:
        demand_folder(path)
    with explained(RunDirectoryError):
        found = compare(run_dirs)
    if as_json:
        click.echo(msgspec.json.encode(found.to_json()).decode())
        return
    for line in _lines(found):
        click.echo(line)


def _lines(found: Comparison) -> Iterator[str]:
    names = [_letter(place) for place in range(len(found.runs))]
    for name, row in zip(names, found.runs, strict=True):
        yield f"{name}  {row.path}"
    yield from _table(
        "settings that differ",
        names,
        [(f"{one.path} ({one.owner})", one.values, None) for one in found.settings],
    )
    yield from _table(
        "environment that differs", names, [(one.path, one.values, None) for one in found.environment]
    )
    yield from _table(
        "results (* the best)",
        names,
        [(one.name, [_result(one.name, value) for value in one.values], one.best) for one in found.summary],
    )
    if any(isinstance(row.mfu, float) and row.mfu > 1 for row in found.runs):
        yield f"  {ABOVE_PEAK}"
    yield ""
    yield from _bits(found, names)
    yield from (f"note: {note}" for note in found.notes)


def _bits(found: Comparison, names: Sequence[str]) -> Iterator[str]:
    same = found.same_bits
    if same.expected:
        yield "the same run and the same data: every bit should be equal"
    else:
        yield f"other bits are to be expected: {'; '.join(same.why_not)}"
    if same.parts_at is None:
        equal = f"the numbers of all {same.steps_compared:,} common logged steps are equal"
        yield equal if same.steps_compared else "they have no logged step in common"
        return
    yield f"what they logged parts at step {same.parts_at:,}"
    for name, values in same.numbers.items():
        for run, value in zip(names, values, strict=True):
            yield f"  {name:<14} {run}  {number_text(value)}"
    if same.expected:
        yield f"find the cause with: phalanx diff {found.runs[0].path} OTHER --replay"


def _table(
    title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[object], int | None]]
) -> Iterator[str]:
    if not rows:
        return
    cells = [["", *names]] + [
        [name, *(_text(value) + ("*" if place == best else "") for place, value in enumerate(values))]
        for name, values, best in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names) + 1)]
    yield ""
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _result(name: str, value: object) -> object:
    """A result in the unit in which the list of runs has it."""
    if not isinstance(value, int | float):
        return value
    match name:
        case "mfu":
            return utilization(value)
        case "goodput":
            return share(value)
        case "tokens" | "tokens_per_s":
            return f"{value:,.0f}"
    return value


def _text(value: object) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"run {place + 1}"

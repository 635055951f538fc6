"""``phalanx runs show`` and ``compare``: everything that was recorded of one run, and several runs side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import demand_folder, explained
from phalanx.cli.output import ABOVE_PEAK, age, moment, number_text, share, size, utilization
from phalanx.command import FiniteRange
from phalanx.command_help import Command
from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.runs.recorded import ComparedRuns, RunRecording, compare, read_recorded

_MOST_NODES = 8
_MOST_NAMES = 10
_PATCH_FLAWS = {"patch_masked": "secrets masked", "patch_cut": "cut", "patch_failed": "git failed"}


@click.command("show", short_help="Everything that was recorded of one run, and what it cost.", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--price",
    type=FiniteRange(min=0),
    default=0.0,
    help="Price of an accelerator hour, for the cost of the run; observe.accelerator_hour_price if not given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_command(run_dir: Path, price: float, as_json: bool) -> None:
    """Show the full record of the run in RUN_DIR: results, code with its changes, packages, command, machines and their differences,
    data and their origin, the runs that it continues from, and its cost.

    \b
      phalanx runs show runs/quickstart-1f3a9c04
      phalanx runs show runs/big-1f3a9c04 --price 2.10
    """
    demand_folder(run_dir)
    with explained(RunDirectoryError):
        recording = read_recorded(run_dir, price)
    if as_json:
        click.echo(msgspec.json.encode(recording.to_json()).decode())
        return
    for line in _lines(recording):
        click.echo(line)


def _lines(recording: RunRecording) -> Iterator[str]:
    """Yield the lines of a recorded run: state, results, code, machines, data, origin, checkpoints, cost and
    problems.

    Of checkpoints the newest ``_MOST_NAMES`` are named; the cost only if it is known.
    """
    row = recording.row
    yield f"{row.name}: {row.state}, step {row.step:,} of {row.steps:,}  ({row.path})"
    if row.tags or row.note:
        yield f"  labels       {' '.join(row.tags)}" + (f"  {row.note}" if row.note else "")
    yield from _results(recording)
    yield from _code(recording)
    yield from _machines(recording)
    data = recording.environment.get("data")
    yield f"data           {row.data_fingerprint or 'unknown'}"
    for name, table in _table(data).items():
        source = _table(table)
        title = f"{name}: " if name else ""
        yield (
            f"  {title}{source.get('address')}, {_number(source.get('train_tokens'))} tokens of {_number(source.get('documents'))} documents, "
            f"manifest {str(source.get('manifest_sha256'))[:12]}"
        )
        recipe = _table(source.get("recipe"))
        yield "    made from  " + ", ".join(f"{key}={_short(value)}" for key, value in recipe.items())
    for origin in row.lineage:
        yield f"continues      {origin}"
    steps = ", ".join(f"{step:,}" for step in recording.checkpoints[-_MOST_NAMES:])
    yield f"checkpoints    {len(recording.checkpoints)} on disk" + (
        f": step{'s' * (len(recording.checkpoints) > 1)} {steps}" if steps else ""
    )
    if recording.cost is not None:
        spent = recording.cost
        yield (
            f"cost           {spent.amount:,.2f}: {spent.accelerator_hours:,.2f} accelerator-hours of its ranks at {spent.price_per_hour:g} "
            "(spares and the time between attempts are not in it)"
        )
    yield from (f"note: {problem}" for problem in row.problems)


def _results(recording: RunRecording) -> Iterator[str]:
    """Yield the lines of results (those with a value, else "none yet"), final weights if known, times and ranks."""
    row = recording.row
    numbers = {
        "loss": _shown("{:.4f}".format, row.loss),
        "held-out loss": _shown("{:.4f}".format, row.held_out_loss),
        "bits per byte": _shown("{:.4f}".format, row.bits_per_byte),
        "tokens": _shown("{:,.0f}".format, row.tokens or None),
        "tokens/s": _shown("{:,.0f}".format, row.tokens_per_s),
        "MFU": _shown(utilization, row.mfu),
        "goodput of the newest start": _shown(share, row.goodput),
    }
    shown = ", ".join(f"{name} {text}" for name, text in numbers.items() if text)
    yield f"results        {shown or 'none yet'}"
    if row.mfu is not None and row.mfu > 1:
        yield f"               {ABOVE_PEAK}"
    if row.weights_sha256:
        yield f"weights        {row.weights_sha256}"
    now = time.time()
    times = [
        f"{word} {moment(at)} ({age(now - at)})"
        for word, at in (("began", row.started), ("last event", row.updated))
        if at
    ]
    yield f"time           {', '.join(times) or 'not begun'}; {row.attempts} attempt{'s' * (row.attempts != 1)}"
    layout = " ".join(f"{axis}={degree}" for axis, degree in row.layout.items())
    yield f"ranks          {row.ranks} on {row.device or 'an unknown device'}" + (
        f", {layout}" if layout else ""
    )


def _shown(words: Callable[[float], str], value: float | None) -> str:
    """Format a value; empty for None."""
    return "" if value is None else words(value)


def _code(recording: RunRecording) -> Iterator[str]:
    """Yield the lines of command, code with its changes, packages and variables; unknown ones are called so or left out."""
    environment = recording.environment
    if environment.get("command"):
        yield f"command        {environment['command']}"
    code = _table(environment.get("code"))
    commit = (
        str(code.get("git_commit") or "") or f"wheel {str(code.get('wheel_record_sha256', 'unknown'))[:12]}"
    )
    yield f"code           {code.get('version', 'unknown')}, {commit}" + (
        ", with changes" if code.get("git_dirty") else ""
    )
    flaws = [word for key, word in _PATCH_FLAWS.items() if code.get(key)]
    if recording.patch or flaws:
        yield f"  changes      {recording.patch or 'not kept'}" + (f" ({', '.join(flaws)})" if flaws else "")
    for key, title in (("untracked", "untracked"), ("left_out", "left out")):
        names = code.get(key)
        if isinstance(names, list) and names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            yield f"  {title:<12} {', '.join(map(str, names[:_MOST_NAMES]))}{more}"
    packages = _table(environment.get("packages"))
    yield f"packages       {', '.join(f'{name} {version}' for name, version in packages.items()) or 'unknown'}"
    if recording.packages:
        yield f"  all          {recording.packages}"
    variables = _table(environment.get("variables"))
    if variables:
        yield "variables      " + " ".join(f"{name}={value}" for name, value in variables.items())


def _machines(recording: RunRecording) -> Iterator[str]:
    """Yield a line for each machine, at most ``_MOST_NODES``, and for each difference between them.

    Without a list of machines, one line of the host that started the run.
    """
    if not recording.machines:
        host = _table(recording.environment.get("host"))
        yield f"machine        {host.get('name', 'unknown')}: {host.get('cpu_model', '')}, {host.get('cores', '?')} cores"
        return
    yield f"machines       {len(recording.machines)}"
    for machine in recording.machines[:_MOST_NODES]:
        gpus = (
            f", {len(machine.accelerators)} x {machine.accelerators[0]}, driver {machine.driver}"
            if machine.accelerators
            else ""
        )
        where = "" if machine.node == machine.host else f" on {machine.host}"
        yield f"  {machine.node}{where}: {machine.cpu_model}, {machine.cores} cores, {size(machine.memory_bytes)}{gpus}"
    if len(recording.machines) > _MOST_NODES:
        yield f"  and {len(recording.machines) - _MOST_NODES} more"
    for difference in recording.differences:
        yield f"  DIFFER in {difference.sentence}"


def _short(value: object) -> str:
    """Return a value as text; a SHA-256 by its first 12 digits."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _table(value: object) -> Mapping[str, object]:
    """Return a value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


# ``phalanx runs compare``.


_LONGEST = 64


@click.command(
    "compare", short_help="Settings, environment, results and bits of runs side by side.", cls=Command
)
@click.argument("run_dirs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(run_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Compare the runs in RUN_DIRS: settings and environment that differ, results, and whether they must have the same bits.

    The logged numbers are compared bit by bit. For checkpoints and causes use phalanx diff RUN_A RUN_B.

    \b
      phalanx runs compare runs/a runs/b
      phalanx runs compare runs/sweep-* --json
    """
    for path in run_dirs:
        demand_folder(path)
    with explained(RunDirectoryError):
        comparison = compare(run_dirs)
    if as_json:
        click.echo(msgspec.json.encode(comparison.to_json()).decode())
        return
    for line in _comparison_lines(comparison):
        click.echo(line)


def _comparison_lines(comparison: ComparedRuns) -> Iterator[str]:
    """Yield the lines of a comparison: runs, settings, environment, results, bits and notes."""
    names = [
        chr(ord("A") + place) if place < 26 else f"run {place + 1}" for place in range(len(comparison.runs))
    ]
    for name, row in zip(names, comparison.runs, strict=True):
        yield f"{name}  {row.path}"
    yield from _comparison_table(
        "settings that differ",
        names,
        [(f"{setting.path} ({setting.owner})", setting.values, None) for setting in comparison.settings],
    )
    yield from _comparison_table(
        "environment that differs", names, [(fact.path, fact.values, None) for fact in comparison.environment]
    )
    yield from _comparison_table(
        "results (* the best)",
        names,
        [
            (outcome.name, [_result(outcome.name, value) for value in outcome.values], outcome.best)
            for outcome in comparison.summary
        ],
    )
    if any(isinstance(row.mfu, float) and row.mfu > 1 for row in comparison.runs):
        yield f"  {ABOVE_PEAK}"
    yield ""
    yield from _bits(comparison, names)
    yield from (f"note: {note}" for note in comparison.notes)


def _bits(comparison: ComparedRuns, names: Sequence[str]) -> Iterator[str]:
    """Yield lines on whether equal bits are expected, where the logged numbers part, and the command that finds the cause."""
    same = comparison.same_bits
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
        yield f"find the cause with: phalanx diff {comparison.runs[0].path} OTHER --replay"


def _comparison_table(
    title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[object], int | None]]
) -> Iterator[str]:
    """Yield the lines of a table of values by run, with a star behind the best; none without rows."""
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
    """Format a result as ``phalanx runs list`` does: MFU and goodput in per cent, tokens with commas; others unchanged."""
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
    """Return a value as text, cut at ``_LONGEST``; "-" for None."""
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

"""``phalanx diff``: the first difference between two runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import trouble
from phalanx.cli.output import MOST, left_out_lines, number_text
from phalanx.cli.train.session import console_for, progress_on
from phalanx.command_help import Command
from phalanx.observe.event_log import EventLogError
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.train.compare.runs import (
    MOST_STEPS_FROM_THE_BEGINNING,
    NothingToCompareError,
    NothingToReplayError,
    RunComparison,
    Verdict,
    compare_runs,
    judge_replays,
    read_logged,
    steps_to_replay,
)


@click.command("diff", cls=Command)
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--replay",
    is_flag=True,
    help="Compute the steps up to the first that differs again, each run on its own number of ranks on this machine, "
    "and name the first module and rank where they part.",
)
@click.option("--ranks", type=click.IntRange(min=1), help="With --replay: replay both runs on so many ranks.")
@click.option(
    "--from-start",
    is_flag=True,
    help=f"With --replay: without a common checkpoint, replay more than {MOST_STEPS_FROM_THE_BEGINNING} steps from the beginning.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run_a: Path, run_b: Path, replay: bool, ranks: int | None, from_start: bool, as_json: bool
) -> None:
    """Show where the runs in RUN_A and RUN_B differ, from their settings to their tensors.

    Compared are the fields of their run files, versions and machines, the logged steps bit by bit up to the first that differs, and
    the tensors of the first checkpoint that differs.

    With --replay the newest checkpoint with equal bits in both is restored, and the steps after it are computed again with a record of all
    tensors. Neither run is written to.

    \b
      phalanx diff runs/quickstart-1f3a9c04 runs/quickstart-1f3a9c04-2
      phalanx diff runs/a runs/b --replay
      phalanx diff runs/a runs/b --replay --ranks 1 --json

    Exit codes: 0 nothing that was computed differs, 1 the runs part, 2 trouble.
    """
    if (ranks or from_start) and not replay:
        raise click.UsageError(f"{'--ranks' if ranks else '--from-start'} needs --replay")
    from phalanx.launch.local import ReplayError, replay_run

    with trouble(EventLogError, NothingToCompareError, NothingToReplayError, ReplayError, RunDirectoryError):
        comparison = compare_runs(run_a, run_b, progress_on(console_for(True)))
        report = msgspec.to_builtins(comparison) | {
            "equal": comparison.equal,
            "parts_at": comparison.parts_at,
            "runs": [str(run_a), str(run_b)],
        }
        if not as_json:
            for line in comparison_lines(comparison, run_a, run_b):
                click.echo(line)
        if replay and comparison.equal:
            click.echo("nothing is replayed: no step and no checkpoint differs", err=True)
        elif replay:
            steps, logs = (
                steps_to_replay(comparison, from_start=from_start),
                (read_logged(RunDirectory(run_a)), read_logged(RunDirectory(run_b))),
            )
            replays = []
            with tempfile.TemporaryDirectory(prefix="phalanx-replay-") as folder:
                for name, path, log in zip("AB", (run_a, run_b), logs, strict=True):
                    click.echo(f"replaying {name}: steps {steps[0] + 1} to {steps[1]}", err=True)
                    replays.append(replay_run(path, log, steps, ranks or 0, Path(folder) / name))
            verdict = judge_replays((replays[0], replays[1]), logs, steps)
            report["replay"] = msgspec.to_builtins(verdict) | {"sentence": verdict.sentence}
            for line in () if as_json else verdict_lines(verdict):
                click.echo(line)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if comparison.equal else 1)


# The text: what two runs differ in, a line for each thing.


def comparison_lines(comparison: RunComparison, run_a: Path, run_b: Path) -> Iterator[str]:
    """Yield the lines of a comparison of two run directories."""
    yield f"A  {run_a}"
    yield f"B  {run_b}"
    yield _kinship(comparison)
    for field in comparison.fields:
        yield f"  field of the {field.owner:<6}  {field.path}: {field.first!r} in A, {field.second!r} in B"
    for name, (in_a, in_b) in comparison.record.items():
        yield f"  recorded             {name}: {in_a!r} in A, {in_b!r} in B"
    if comparison.numbers is None:
        yield f"logged: the numbers of all {comparison.steps_compared} common steps are equal"
    else:
        before = f"equal up to step {comparison.last_equal_step}, then " if comparison.last_equal_step else ""
        yield f"logged: {before}different at step {comparison.numbers.step}"
        for name, (a, b) in comparison.numbers.numbers.items():
            yield f"  {name:<14} {number_text(a)} in A, {number_text(b)} in B"
    read = ", ".join(map(str, comparison.checkpoints_compared)) or "none"
    if comparison.checkpoint is None:
        yield f"checkpoints of the same steps: {read}" + (
            " (equal)" if comparison.checkpoints_compared else ""
        )
    else:
        tensors = comparison.checkpoint.tensors
        count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
        yield f"checkpoints of the same steps: {read}; that of step {comparison.checkpoint.step} differs in {count}"
        for tensor in tensors[:MOST]:
            yield f"  {tensor.name}: {tensor.description}"
        if len(tensors) > MOST:
            yield f"  ... and {len(tensors) - MOST} more"
    yield from (f"note: {note}" for note in comparison.notes)
    yield (
        "nothing that was computed differs"
        if comparison.equal
        else f"the runs part at step {comparison.parts_at}, or before it"
    )


def _kinship(comparison: RunComparison) -> str:
    """Return a sentence on how far the two runs are the same."""
    if comparison.same_run:
        return "the same run and the same data: every bit should be equal"
    if "data_fingerprint" not in comparison.record and all(
        field.owner != "run" for field in comparison.fields
    ):
        return "the same run and the same data on other layouts, which decide how sums are split"
    return "two different runs (fields of the run, or their data, differ): compared as far as they go"


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """Yield the lines of the result of both replays."""
    origin = f"from the checkpoint of step {verdict.from_step}" if verdict.from_step else "from the beginning"
    yield f"replayed {origin} to step {verdict.to_step}: {verdict.compared.observations:,} tensors compared"
    yield verdict.sentence
    for number in verdict.unconfirmed:
        yield f"  {number.run} logged {number.name} {number_text(number.logged)} at step {number.step}, its replay gives {number_text(number.replayed)}"
    yield from left_out_lines(verdict.compared)

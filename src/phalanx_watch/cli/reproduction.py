"""``phalanx diff`` and ``phalanx reproduce``: where two runs part; and a run repeated, or the differences between then and now."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import msgspec

from phalanx.cli.errors import TroubleError, demand_folder, refuse_given, trouble
from phalanx.cli.output import MOST, left_out_lines, number_text
from phalanx.cli.train.session import console_for, progress_on
from phalanx.command import Argument, AsJson, Option, command_options
from phalanx.command_help import Command
from phalanx.observe.event_log import EventLogError
from phalanx.observe.record.records import usable_cores
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.fields import POSITIVE
from phalanx.run.identity import read_unchanged
from phalanx.run.spec import RunSpec
from phalanx.train.compare import runs
from phalanx_watch.runs import reproduce
from phalanx_watch.runs.recorded import RunRecording, read_recorded

_LONGEST = 100
_FROM_START = f"With --replay: without a common checkpoint, replay more than {runs.MOST_STEPS_FROM_THE_BEGINNING} steps from the beginning."
_MOST_RANKS = 8
"""Most ranks on one machine, unless it has more cores."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    run_dir: Annotated[Path, Argument()]
    dry_run: bool = False
    """Print what differs between then and now, and run nothing."""
    steps: Annotated[int | None, POSITIVE] = None
    """Stop after so many steps and compare those."""
    ranks: Annotated[int | None, POSITIVE] = None
    """On so many ranks; as many as the run had if not given."""
    into: Path | None = None
    """The new run directory; RUN_DIR-again if not given."""
    environment: Annotated[Path | None, Option("--make-env")] = None
    """Build the environment of the run in this new folder first: its packages in their versions, its code; and run nothing."""
    yes: bool = False
    """Run it again without confirmation."""
    as_json: AsJson = False
    """Print one JSON object at the end."""


@click.command("reproduce", cls=Command)
@command_options(ReproduceOptions)
def reproduce_command(options: ReproduceOptions) -> None:
    """Run the run in RUN_DIR again, by its own run file, in a new directory; end with "same hash", or with the first logged step that differs.

    First it prints the differences between then and now (code, packages, machine, data, and the bits of this machine's kernels),
    and waits for confirmation.

    \b
      phalanx reproduce runs/quickstart-1f3a9c04 --dry-run
      phalanx reproduce runs/quickstart-1f3a9c04 --steps 20 --yes
      phalanx reproduce runs/quickstart-1f3a9c04 --make-env /tmp/then

    Exit codes: 0 the same bits (with --dry-run: nothing that may change them differs), 1 they part (or something differs), 2 trouble, or nothing was run.
    """
    of_training = ("steps", "ranks", "into", "yes")
    if options.environment is not None:
        refuse_given(
            (*of_training, "dry_run", "as_json"), "--make-env builds an environment, and runs nothing"
        )
    if options.dry_run:
        refuse_given(of_training, "--dry-run runs nothing")
    demand_folder(options.run_dir, TroubleError)
    with trouble(RunDirectoryError):
        recording = read_recorded(options.run_dir)
        spec = read_unchanged(RunDirectory(options.run_dir))
        if options.environment is not None:
            python = reproduce.make_environment(
                recording, options.environment, lambda text: click.echo(text, err=True)
            )
            click.echo(f"{python} -m phalanx reproduce {options.run_dir}")
            return
        packages = Path(recording.packages).read_text() if recording.packages else ""
        differ = reproduce.changes(
            reproduce.then(recording, packages),
            reproduce.now(spec, RunDirectory(Path(recording.row.path)), _probes(spec)),
        )
    if not options.as_json:
        for line in _lines(recording, differ):
            click.echo(line)
    if options.dry_run:
        if options.as_json:
            click.echo(msgspec.json.encode({"run": str(options.run_dir), "changed": differ}).decode())
        sys.exit(1 if any(change.weight != "no" for change in differ) else 0)
    if not options.yes:
        if not sys.stdin.isatty():
            raise TroubleError("nothing was run: give --yes without a terminal, or --dry-run")
        if not click.confirm("run it again?"):
            raise TroubleError("nothing was run")
    with trouble(RunDirectoryError):
        chosen = options.ranks or _fitting(recording.row.ranks)
    sys.exit(_again(options, spec, chosen, differ))


def _fitting(ranks: int) -> int:
    """Return ``ranks``, the number that the run had, to train with; 1 for 0.

    Raises ``RunDirectoryError`` if it is more than both ``_MOST_RANKS`` and this machine's cores.
    """
    if ranks > max(_MOST_RANKS, usable_cores()):
        raise RunDirectoryError(
            f"the run had {ranks:,} ranks, which are not for one machine: give --ranks N; the bits do not depend on it"
        )
    return max(1, ranks)


def _probes(spec: RunSpec) -> dict[str, str]:
    """Return the bits of this machine's kernels on the run's kind of device; empty without such a device. Makes this process
    deterministic."""
    from phalanx.parallel.process_group.rendezvous import RendezvousError, device_for
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.measure.numerics import probe

    try:
        device = device_for(spec.runtime.device, 0)
    except RendezvousError:
        return {}
    make_deterministic(spec, device)
    return dict(probe(spec, device).probes)


def _lines(recording: RunRecording, differ: list[reproduce.Changed]) -> Iterator[str]:
    """Yield lines on the run's state and on each difference between then and now, with its effect on bits and its remedy."""
    yield f"{recording.row.name}: {recording.row.state}, step {recording.row.step:,} of {recording.row.steps:,}, weights {recording.row.weights_sha256[:12] or 'not final'}"
    if not differ:
        yield "nothing differs between then and now: code, packages, machine, data, and the bits of its kernels are as they were"
        return
    titles = {"bits": "changes the bits", "perhaps": "may change the bits", "no": "changes no bit"}
    for change in differ:
        yield f"{titles[change.weight]:<20} {change.name}"
        yield f"  then  {_short(change.then)}"
        yield f"  now   {_short(change.now)}"
        if change.remedy:
            yield f"  as it was by: {change.remedy.replace('RUN_DIR', recording.row.path)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _again(options: ReproduceOptions, spec: RunSpec, ranks: int, differ: list[reproduce.Changed]) -> int:
    """Train the run again on ``ranks`` ranks, in ``into`` or a free directory beside it, and compare; print the verdict.

    Return the exit code: 0 if all bits are the same, else 1. ``steps`` None trains to the end. Raises
    ``TroubleError`` if the training fails, or there is nothing to compare.
    """

    run_dir = options.run_dir
    place = options.into or reproduce.free_directory(run_dir)
    with trouble(RunDirectoryError, runs.NothingToCompareError):
        file = reproduce.write_run_file(reproduce.again(spec, RunDirectory(run_dir), place, ranks), place)
        click.echo(f"training it again in {place}, by {file}", err=True)
        code = reproduce.train_again(file, RunDirectory(place), options.steps)
        if code:
            raise RunDirectoryError(
                f"the training in {place} ended with exit code {code}; its logs are in {place / 'logs'}"
            )
        compared = runs.compare_runs(run_dir, place)
    hashes = [RunDirectory(path).finished_result() for path in (run_dir, place)]
    finals = [result.weights_sha256 for result in hashes if result is not None]
    same = compared.equal and len(set(finals)) <= 1
    verdict = _verdict(compared.parts_at, finals, compared.steps_compared, same=same)
    if options.as_json:
        table = {
            "run": str(run_dir),
            "again": str(place),
            "changed": differ,
            "same": same,
            "weights_sha256": finals,
            "parts_at": compared.parts_at,
            "steps_compared": compared.steps_compared,
            "verdict": verdict,
        }
        click.echo(msgspec.json.encode(table).decode())
        return 0 if same else 1
    if not same:
        for line in comparison_lines(compared, run_dir, place):
            click.echo(line)
    click.echo(verdict)
    return 0 if same else 1


def _verdict(parts_at: int | None, finals: list[str], steps: int, *, same: bool) -> str:
    """Return a sentence on the comparison: same hash, same logged steps, other hashes, or the step at which they
    part.

    ``finals`` are the hashes of those of the two runs that have finished.
    """
    if same and len(finals) == 2:
        return f"same hash: {finals[0]} (and the same numbers in all {steps:,} logged steps)"
    if same:
        return f"the same bits in all {steps:,} logged steps that both have; the end of one of them is missing, so no hash is compared"
    if parts_at is None:
        return f"other hashes, {' and '.join(digest[:12] for digest in finals)}, but no logged step differs: they part after the last one"
    return f"they part at step {parts_at:,}, or before it"


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    run_a: Annotated[Path, Argument()]
    run_b: Annotated[Path, Argument()]
    replay: bool = False
    """Compute the steps up to the first that differs again, each run on its own number of ranks on this machine, and name the first module
    and rank where they part."""
    ranks: Annotated[int | None, POSITIVE] = None
    """With --replay: replay both runs on so many ranks."""
    from_start: Annotated[bool, Option(text=_FROM_START)] = False
    as_json: AsJson = False


@click.command("diff", cls=Command)
@command_options(DiffOptions)
def diff_command(options: DiffOptions) -> None:
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
    if (options.ranks or options.from_start) and not options.replay:
        raise click.UsageError(f"{'--ranks' if options.ranks else '--from-start'} needs --replay")
    from phalanx.launch.local import ReplayError, replay_run

    run_a, run_b = options.run_a, options.run_b
    with trouble(
        EventLogError, runs.NothingToCompareError, runs.NothingToReplayError, ReplayError, RunDirectoryError
    ):
        comparison = runs.compare_runs(run_a, run_b, progress_on(console_for(True)))
        report = msgspec.to_builtins(comparison) | {
            "equal": comparison.equal,
            "parts_at": comparison.parts_at,
            "runs": [str(run_a), str(run_b)],
        }
        if not options.as_json:
            for line in comparison_lines(comparison, run_a, run_b):
                click.echo(line)
        if options.replay and comparison.equal:
            click.echo("nothing is replayed: no step and no checkpoint differs", err=True)
        elif options.replay:
            steps = runs.steps_to_replay(comparison, from_start=options.from_start)
            logs = runs.read_logged(RunDirectory(run_a)), runs.read_logged(RunDirectory(run_b))
            replays = []
            with tempfile.TemporaryDirectory(prefix="phalanx-replay-") as folder:
                for name, path, log in zip("AB", (run_a, run_b), logs, strict=True):
                    click.echo(f"replaying {name}: steps {steps[0] + 1} to {steps[1]}", err=True)
                    replays.append(replay_run(path, log, steps, options.ranks or 0, Path(folder) / name))
            verdict = runs.judge_replays((replays[0], replays[1]), logs, steps)
            report["replay"] = msgspec.to_builtins(verdict) | {"sentence": verdict.sentence}
            for line in () if options.as_json else verdict_lines(verdict):
                click.echo(line)
    if options.as_json:
        click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if comparison.equal else 1)


# Text of a comparison: one line for each difference of two runs.


def comparison_lines(comparison: runs.RunComparison, run_a: Path, run_b: Path) -> Iterator[str]:
    """Yield the lines of a comparison of two run directories: fields, records, logged numbers, tensors, notes and the verdict."""
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


def _kinship(comparison: runs.RunComparison) -> str:
    """Return one of three sentences: the same run and data, the same on other layouts, or two different runs."""
    if comparison.same_run:
        return "the same run and the same data: every bit should be equal"
    if "data_fingerprint" not in comparison.record and all(
        field.owner != "run" for field in comparison.fields
    ):
        return "the same run and the same data on other layouts, which decide how sums are split"
    return "two different runs (fields of the run, or their data, differ): compared as far as they go"


def verdict_lines(verdict: runs.ReplayResult) -> Iterator[str]:
    """Yield the lines of the result of both replays: their steps, the verdict, unconfirmed numbers, and what was left out."""
    origin = f"from the checkpoint of step {verdict.from_step}" if verdict.from_step else "from the beginning"
    yield f"replayed {origin} to step {verdict.to_step}: {verdict.compared.observations:,} tensors compared"
    yield verdict.sentence
    for number in verdict.unconfirmed:
        yield f"  {number.run} logged {number.name} {number_text(number.logged)} at step {number.step}, its replay gives {number_text(number.replayed)}"
    yield from left_out_lines(verdict.compared)

"""``phalanx reproduce``: train a run again, and compare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import TroubleError, demand_folder, trouble
from phalanx.command_help import Command
from phalanx.observe.record.records import usable_cores
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx_watch.runs.recorded import RunRecording, read_recorded
from phalanx_watch.runs.reproduce import Changed, changes, now, then

_LONGEST = 100
_MOST_RANKS = 8
"""Most ranks on one machine, unless it has more cores."""


@click.command("reproduce", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Print what differs between then and now, and run nothing.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after so many steps and compare those.")
@click.option(
    "--ranks", type=click.IntRange(min=1), help="On so many ranks; as many as the run had if not given."
)
@click.option(
    "--into", type=click.Path(path_type=Path), help="The new run directory; RUN_DIR-again if not given."
)
@click.option(
    "--make-env",
    "environment",
    type=click.Path(path_type=Path),
    help="Build the environment of the run in this new folder first: its packages in their versions, its code; and run nothing.",
)
@click.option("--yes", is_flag=True, help="Run it again without confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    run_dir: Path,
    dry_run: bool,
    steps: int | None,
    ranks: int | None,
    into: Path | None,
    environment: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Run the run in RUN_DIR again, by its own run file, in a new directory; end with "same hash", or with the first logged step that differs.

    First it prints the differences between then and now (code, packages, machine, data, and the bits of this machine's kernels),
    and waits for confirmation.

    \b
      phalanx reproduce runs/quickstart-1f3a9c04 --dry-run
      phalanx reproduce runs/quickstart-1f3a9c04 --steps 20 --yes
      phalanx reproduce runs/quickstart-1f3a9c04 --make-env /tmp/then

    Exit codes: 0 the same bits (with --dry-run: nothing that may change them differs), 1 they part (or something differs), 2 trouble.
    """
    from phalanx_watch.runs.reproduce import make_environment

    demand_folder(run_dir, TroubleError)
    with trouble(RunDirectoryError):
        recording = read_recorded(run_dir)
        spec = read_resolved(RunDirectory(run_dir))
        if environment is not None:
            python = make_environment(recording, environment, lambda text: click.echo(text, err=True))
            click.echo(f"{python} -m phalanx reproduce {run_dir}")
            return
        differ = _differences(recording, spec)
    if not as_json:
        for line in _lines(recording, differ):
            click.echo(line)
    harmful = any(change.weight != "no" for change in differ)
    is_prompted = not yes and not dry_run and sys.stdin.isatty()
    if dry_run or (not yes and not (is_prompted and click.confirm("run it again?"))):
        if not dry_run and not is_prompted:
            click.echo("nothing was run: give --yes without a terminal", err=True)
        if as_json:
            click.echo(
                msgspec.json.encode(
                    {"run": str(run_dir), "changed": [msgspec.to_builtins(change) for change in differ]}
                ).decode()
            )
        sys.exit(1 if harmful else 0)
    with trouble(RunDirectoryError):
        chosen = ranks or _fitting(recording.row.ranks)
    sys.exit(_again(run_dir, spec, chosen, steps, into, differ, as_json=as_json))


def _fitting(ranks: int) -> int:
    """Return the run's number of ranks, if it fits one machine. Raises ``RunDirectoryError``."""
    if ranks > max(_MOST_RANKS, usable_cores()):
        raise RunDirectoryError(
            f"the run had {ranks:,} ranks, which are not for one machine: give --ranks N; the bits do not depend on it"
        )
    return max(1, ranks)


def _differences(recording: RunRecording, spec: RunSpec) -> list[Changed]:
    packages = Path(recording.packages).read_text() if recording.packages else ""
    return changes(
        then(recording, packages), now(spec, RunDirectory(Path(recording.row.path)), _probes(spec))
    )


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


def _lines(recording: RunRecording, differ: list[Changed]) -> Iterator[str]:
    """Yield lines on what differs between then and now, with its weight and remedy."""
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


def _again(
    run_dir: Path,
    spec: RunSpec,
    ranks: int,
    steps: int | None,
    into: Path | None,
    differ: list[Changed],
    *,
    as_json: bool,
) -> int:
    """Train the run again and compare; print the verdict and return the exit code: 0 if all bits are the same.

    Raises ``TroubleError`` if the training fails, or there is nothing to compare.
    """
    from phalanx.train.compare.runs import NothingToCompareError, compare_runs
    from phalanx_watch.cli.diff_command import comparison_lines
    from phalanx_watch.runs.reproduce import again, free_directory, train_again, write_run_file

    place = into or free_directory(run_dir)
    with trouble(RunDirectoryError, NothingToCompareError):
        file = write_run_file(again(spec, RunDirectory(run_dir), place, ranks), place)
        click.echo(f"training it again in {place}, by {file}", err=True)
        code = train_again(file, RunDirectory(place), steps)
        if code:
            raise RunDirectoryError(
                f"the training in {place} ended with exit code {code}; its logs are in {place / 'logs'}"
            )
        compared = compare_runs(run_dir, place)
    hashes = [RunDirectory(path).finished_result() for path in (run_dir, place)]
    finals = [result.weights_sha256 for result in hashes if result is not None]
    same = compared.equal and len(set(finals)) <= 1
    verdict = _verdict(compared.parts_at, finals, compared.steps_compared, same=same)
    if as_json:
        table = {
            "run": str(run_dir),
            "again": str(place),
            "changed": [msgspec.to_builtins(change) for change in differ],
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
    """Return a sentence on the comparison: same hash, same logged steps, other hashes, or the step at which they part."""
    if same and len(finals) == 2:
        return f"same hash: {finals[0]} (and the same numbers in all {steps:,} logged steps)"
    if same:
        return f"the same bits in all {steps:,} logged steps that both have; the end of one of them is missing, so no hash is compared"
    if parts_at is None:
        return f"other hashes, {' and '.join(digest[:12] for digest in finals)}, but no logged step differs: they part after the last one"
    return f"they part at step {parts_at:,}, or before it"

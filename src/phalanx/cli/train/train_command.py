"""``phalanx train``: from a run file to weights."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phalanx.cli.errors import explained
from phalanx.data.errors import DataError
from phalanx.hardware.detect import gpu_count
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.records import usable_cores
from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.problems import RunFileError
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.ending import Ending
from phalanx.train.lifecycle.run_directory import OpenRun, RunDirectory, RunDirectoryError


@click.command("train")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), help="Data-parallel ranks to start on this machine.")
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field; may be repeated."
)
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Train as a fleet of so many nodes on this machine."
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Nodes more, warm, to step in (short for --set fleet.spares=...).",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help='Break something: "kill node 2 at step 30", a file of such lines, or random:SEED:COUNT; may be repeated.',
)
@click.option("--run-dir", help="The run directory (short for --set run_dir=...).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
def command(
    run_file: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    nodes: int | None,
    spares: int | None,
    faults: tuple[str, ...],
    run_dir: str | None,
    as_json: bool,
) -> None:
    """Train the run that RUN_FILE describes.

    Started again after Ctrl-C, a crash or kill -9, it goes on from the newest good checkpoint, on as many ranks as there
    are then; the weights at the end are the same.

    \b
      phalanx train configs/quickstart.toml
      phalanx train configs/quickstart.toml --ranks 3 --json
      phalanx train run.toml --set train.steps=50 --set optimizer.lr=3e-4
      phalanx train configs/quickstart.toml --nodes 4 --spares 1 --fault "kill node 2 at step 30"
      torchrun --nproc-per-node 2 -m phalanx train run.toml

    Exit codes: 0 finished, 75 stopped on request (start again to go on), 1 failed.
    """
    extra = [f"run_dir={json.dumps(run_dir)}"] if run_dir else []
    extra += [f"parallel.ranks={ranks}"] if ranks else []
    extra += [f"fleet.nodes={nodes}"] if nodes else []
    extra += [f"fleet.spares={spares}"] if spares is not None else []
    with explained(DataError, RunDirectoryError):
        spec = read_run(run_file, PRESETS, [*overrides, *extra])
    if _started_as_rank():
        from phalanx.cli.train.train_as_rank import train_as_rank

        sys.exit(train_as_rank(spec, run_file, as_json))
    if spec.fleet.nodes:
        from phalanx.cli.train.train_fleet import train_fleet

        sys.exit(train_fleet(spec, run_file, faults, as_json))
    if faults or spares:
        raise click.UsageError(f"{'--fault' if faults else '--spares'} needs a fleet: add --nodes N")
    sys.exit(_train_here(spec, run_file, as_json))


def _started_as_rank() -> bool:
    from phalanx.launch.foreign import started_as_rank

    return started_as_rank(os.environ)


def _train_here(spec: RunSpec, run_file: Path, as_json: bool) -> int:
    from phalanx.launch.local import run_locally
    from phalanx.train.lifecycle.prepare import prepare_run

    console = console_for(as_json)
    with explained(DataError, RunDirectoryError):
        if spec.run_dir and (done := RunDirectory(Path(spec.run_dir)).finished_result()) is not None:
            return already_done(spec, run_file, done, console, as_json)
        ranks = _ranks(spec, run_file)
        run = prepare_run(spec, run_file, progress_on(console))
    console.print(
        f"run directory {run.directory.path}, {ranks} {'rank' if ranks == 1 else 'ranks'} on this machine"
    )
    for change in run.layout_changes:
        console.print(
            f"[yellow]another layout than before[/]: {change}; the bits of the weights depend on it"
        )
    ending = run_locally(run, ranks, shower(run, console))
    os.close(run.lock_fd)
    return conclude(run, ending, console, as_json, {})


def conclude(run: OpenRun, ending: Ending, console: Any, as_json: bool, more: dict[str, Any]) -> int:
    """Says how a run ended, with ``more`` in its result; the exit code."""
    if ending.status == "finished":
        _report(run.directory, run.spec, console, as_json, more)
        return 0
    again = shlex.join(["phalanx", *sys.argv[1:]])
    if ending.status == "stopped":
        console.print(f"[yellow]stopped[/]; to go on: {again}")
        return ending.exit_code
    who = "" if ending.failed_rank is None else f"rank {ending.failed_rank} "
    click.echo(f"error: {who}{ending.message}", err=True)
    if any(run.directory.checkpoints.glob("step-*")):
        click.echo(f"To go on from the newest checkpoint: {again}", err=True)
    return 1


def _ranks(spec: RunSpec, run_file: Path) -> int:
    """As many ranks as the run file says, or as the machine has room for."""
    if spec.parallel.ranks:
        return spec.parallel.ranks
    room = gpu_count() if spec.runtime.device != "cpu" else 0
    replica = replica_ranks(spec.parallel)
    most = spec.train.slots * spec.parallel.pipeline * spec.parallel.context * spec.parallel.tensor
    ranks = max(min(room or max(1, usable_cores() // spec.runtime.threads), most), replica)
    while ranks > replica and layout_problems(spec, ranks):
        ranks -= 1
    problems = layout_problems(spec, ranks)
    if problems:
        raise RunFileError(run_file, problems)
    return ranks


def console_for(as_json: bool) -> Any:
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


def progress_on(console: Any) -> Callable[[str, int, int], None]:
    """Prints what is being prepared, at most once a second."""
    last: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - last.get(what, 0.0) > 1.0:
            last[what] = now
            console.print(f"[dim]{what}[/] {done:,}" + (f" of {total:,}" if total else ""))

    return show


def shower(run: OpenRun, console: Any) -> Callable[[Callable[[], bool]], None]:
    """What shows the run's progress while its ranks run: the events of this attempt, as they come."""

    def show(ended: Callable[[], bool]) -> None:
        from phalanx.observe.display.terminal import show_events
        from phalanx.observe.event_log import follow

        ours = (event for event in follow(run.directory.events, ended) if event.attempt >= run.attempt)
        run.directory.events.touch()
        show_events(ours, console, live=console.is_terminal)

    return show


def already_done(spec: RunSpec, run_file: Path, done: dict[str, Any], console: Any, as_json: bool) -> int:
    from phalanx.train.lifecycle.prepare import prepare_run

    run = prepare_run(spec, run_file, progress_on(console))  # checks that it is this run's directory
    os.close(run.lock_fd)
    console.print(f"{run.directory.path} is complete: {done['step']} steps, nothing to do")
    _report(run.directory, run.spec, console, as_json, {})
    return 0


def _report(
    directory: RunDirectory, spec: RunSpec, console: Any, as_json: bool, more: dict[str, Any]
) -> None:
    """What a finished run is worth: sample, held-out text beside xz, directory, hash."""
    result = directory.finished_result()
    assert result is not None
    result |= more
    if spec.sample.prompt:
        from phalanx.serve.sample import sample_text

        text = sample_text(directory.path, spec.sample)
        console.rule("[bold]sample[/]", align="left")
        console.print(text, markup=False)
        console.rule()
        result["sample"] = text
    from phalanx.cli.train.result_table import result_table

    console.print(result_table(result, directory))
    if as_json:
        click.echo(json.dumps(result))

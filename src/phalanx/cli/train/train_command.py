"""``phalanx train``: from a run file to weights."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from phalanx.cli.errors import explained, refuse_unused, trouble
from phalanx.cli.train.session import (
    conclude,
    console_for,
    event_display,
    print_earlier_data,
    print_fallback,
    print_on,
    print_parent,
    progress_on,
    report_finished,
)
from phalanx.command import (
    Argument,
    AsJson,
    Heading,
    Option,
    Overrides,
    Sets,
    command_options,
    set_fields,
    written_options,
)
from phalanx.command_help import Command
from phalanx.data.errors import DataError
from phalanx.launch.foreign import started_as_rank
from phalanx.model.facts.presets import PRESETS
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE
from phalanx.run.read import RUN_FILE, override, read_run, read_table
from phalanx.run.spec import RunSpec
from phalanx.train.start.origins import child_run, fields_from_model

_NEWEST = "newest"
_MOST_DIGITS = 15


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    places: Annotated[tuple[Path, ...], Argument(metavar="[RUN_FILE|RUN_DIR]")] = ()
    ranks: Annotated[int | None, POSITIVE, Sets("parallel.ranks"), Heading("Ranks and nodes")] = None
    """Ranks to start on this machine, of all axes (short for --set parallel.ranks=...)."""
    overrides: Annotated[Overrides, Heading("Run")] = ()
    """Override a field; may be repeated."""
    from_step: Annotated[
        str | None,
        Option("--from", metavar="[STEP]", flag_value=_NEWEST, is_flag=False),
        Heading("Start from"),
    ] = None
    """Continue from the checkpoint of STEP of the run in RUN_DIR (without STEP: the newest) as a run of its
    own, with the values of --set from that step on."""
    from_model: Annotated[Path | None, Option(metavar="DIR")] = None
    """Start from the weights of the imported model in DIR, on the text of --data."""
    data: Annotated[Path | None, Option(metavar="PATH")] = None
    """With --from-model: a prepared dataset, or text, which is prepared with the model's tokenizer."""
    nodes: Annotated[int | None, POSITIVE, Sets("fleet.nodes"), Heading("Ranks and nodes")] = None
    """Train as a fleet of this many nodes on this machine."""
    spares: Annotated[int | None, NOT_NEGATIVE, Sets("fleet.spares")] = None
    """Additional warm nodes that replace lost ones (short for --set fleet.spares=...)."""
    faults: Annotated[tuple[str, ...], Option("--fault", metavar="FAULT")] = ()
    """Inject a fault: "kill node 2 at step 30", a file of such lines, or random:SEED:COUNT; may be repeated."""
    check_layout: Annotated[str | None, Option(metavar="FIELD=VALUE,..."), Heading("Compare layouts")] = None
    """Train a few steps on the run's layout and on another one, such as "tensor=2,ranks=4" (fields of
    [parallel]), in temporary directories, and show the first difference."""
    check_steps: Annotated[int, POSITIVE] = 3
    """Steps of --check-layout."""
    run_dir: Annotated[str | None, Sets("run_dir"), Heading("Run")] = None
    """The run directory (short for --set run_dir=...)."""
    as_json: AsJson = False
    """Print the result as one JSON object on the last line."""


@click.command("train", cls=Command)
@command_options(TrainOptions)
def command(options: TrainOptions) -> None:
    """Train the run that RUN_FILE describes, or continue the one in RUN_DIR.

    Run it again after Ctrl-C, a crash or kill -9: it resumes from the newest good checkpoint, on as many
    ranks as are available then; the weights at the end are the same. With --from it continues as a child run:
    in a directory of its own, with the same optimizer state, step and place in the data. From that step on, other
    values of train.steps, optimizer.lr, schedule and train.batch_size apply. With --from-model no run file is needed.

    \b
      phalanx train configs/quickstart.toml
      phalanx train configs/quickstart.toml --ranks 3 --json
      phalanx train run.toml --set train.steps=50 --set optimizer.lr=3e-4
      phalanx train runs/quickstart-1f3a9c04 --from 100 --set train.steps=400
      phalanx train --from-model imported/llama --data notes/ --set train.steps=200
      phalanx train configs/quickstart.toml --nodes 4 --spares 1 --fault "kill node 2 at step 30"
      phalanx train run.toml --ranks 1 --check-layout "sharding=zero3,ranks=4"
      torchrun --nproc-per-node 2 -m phalanx train run.toml

    Exit codes: 0 finished, also early by evaluation.stop_after, 75 stopped on request (run it again to continue), 1 failed. With --check-layout: 0 the
    layouts agree in every bit, 1 they differ, 2 they could not be compared.
    """
    if len(options.places) > 1:
        raise click.UsageError(
            f"give one run file or run directory, not {len(options.places)}: {', '.join(map(str, options.places))}"
        )
    place = options.places[0] if options.places else None
    if options.check_layout is not None:
        unused = written_options(options, "nodes", "spares", "faults", "run_dir")
        refuse_unused(unused, "--check-layout trains a few steps on this machine, in temporary directories")
    shown = explained if options.check_layout is None else trouble
    with shown(DataError, RunDirectoryError):
        spec, run_file = _read_requested_run(place, options)
    if options.check_layout is not None:
        from phalanx.cli.train.check_layout import compare_layouts

        sys.exit(compare_layouts(spec, run_file, options.check_layout, options.check_steps, options.as_json))
    if started_as_rank(os.environ):
        from phalanx.cli.train.train_as_rank import train_as_rank

        sys.exit(train_as_rank(spec, run_file, options.as_json))
    if spec.fleet.nodes:
        from phalanx.cli.train.train_fleet import train_fleet

        sys.exit(train_fleet(spec, run_file, options.faults, options.as_json))
    if options.faults or options.spares:
        raise click.UsageError(f"{'--fault' if options.faults else '--spares'} needs a fleet: add --nodes N")
    sys.exit(_train_here(spec, run_file, options.as_json))


def _read_requested_run(place: Path | None, options: TrainOptions) -> tuple[RunSpec, Path]:
    """Return the run of the command line, and the path of its run file, for messages.

    ``place`` is a run file or a run directory. Raises UsageError if options contradict each other, and RunFileError.
    """
    from_step, model, data = options.from_step, options.from_model, options.data
    overrides = [*options.overrides, *set_fields(options)]
    if model is not None or data is not None:
        if model is None or data is None:
            raise click.UsageError("--from-model and --data belong together: give both")
        if from_step is not None:
            raise click.UsageError(
                "--from continues a run, --from-model starts one: leave out one of the two"
            )
        fields = [*fields_from_model(model, data, bare=place is None), *overrides]
        if place is None:
            return read_table({}, PRESETS, fields, Path("--from-model")), Path("--from-model")
        return read_run(place, PRESETS, fields), place
    if place is None and from_step not in (None, _NEWEST):
        raise click.UsageError(
            f"--from takes a step: give the run directory before it, phalanx train {from_step} --from STEP"
        )
    if place is None:
        raise click.UsageError("give a run file, a run directory, or --from-model")
    if from_step is not None:
        if place.is_file():
            raise click.UsageError(f"--from continues a run directory, and {place} is a file")
        if from_step != _NEWEST and not (from_step.isdecimal() and len(from_step) <= _MOST_DIGITS):
            raise click.BadParameter(f"{from_step!r} is no step", param_hint="--from")
        step = None if from_step == _NEWEST else int(from_step)
        return child_run(place, step, overrides), place / RUN_FILE
    if place.is_dir():
        here = f"run_dir={json.dumps(str(place), ensure_ascii=False)}"
        return override(
            read_resolved(RunDirectory(place)), [*overrides, here], place / RUN_FILE
        ), place / RUN_FILE
    return read_run(place, PRESETS, overrides), place


def _train_here(spec: RunSpec, run_file: Path, as_json: bool) -> int:
    """Train a run on this machine, or report it if it is complete. Return the exit code."""
    from phalanx.launch.local import ranks_on_this_machine, run_locally
    from phalanx.train.start.prepare import prepare_run

    console = console_for(as_json)
    with explained(DataError, RunDirectoryError):
        if spec.run_dir and (result := RunDirectory(Path(spec.run_dir)).complete_result(spec)) is not None:
            return report_finished(spec, run_file, result, console, as_json)
        ranks = ranks_on_this_machine(spec, run_file)
        run = prepare_run(spec, run_file, progress_on(console))
    console.print(
        f"run directory {run.directory.path}, {ranks} {'rank' if ranks == 1 else 'ranks'} on this machine",
        soft_wrap=True,
    )
    print_parent(run, console)
    print_earlier_data(run, console)
    print_fallback(spec, run, console)
    for change in run.layout_changes:
        console.print(
            f"another layout than before: {change}; the bits of the weights depend on it", style="yellow"
        )
    ending = run_locally(run, ranks, event_display(run, console), print_on(console))
    os.close(run.lock_fd)
    return conclude(run, ending, console, as_json, None)

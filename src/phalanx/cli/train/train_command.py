"""``phalanx train``: from a run file to weights; as a rank of an external launcher, or on two layouts that are compared."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Annotated

import click
import msgspec

from phalanx.cli.errors import explained, refuse_given, refuse_unused, trouble
from phalanx.cli.output import left_out_lines, number_text
from phalanx.cli.train import session
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
from phalanx.data.reading.sources import index_of_places
from phalanx.hardware.local.detect import set_for_rank
from phalanx.launch.engines.order import started_as_rank
from phalanx.launch.local import ReplayError, ranks_on_this_machine, replay_locally, run_locally
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.display.terminal import show_events
from phalanx.observe.event_log import follow
from phalanx.observe.logs.capture import also_log
from phalanx.observe.logs.log_file import order_for
from phalanx.process.exit_codes import EXIT_FAILED, EXIT_STOPPED
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved, step_of
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, RunFileError
from phalanx.run.identity import identity
from phalanx.run.layout import Layout, layout_of
from phalanx.run.read import RUN_FILE, override, read_run, read_table
from phalanx.run.spec import RunSpec
from phalanx.train.compare.observation import Compared, Replay, ReplayOrder, compare_replays
from phalanx.train.compare.runs import bits
from phalanx.train.lifecycle.worker import group_timeout_s, known_errors, run_rank
from phalanx.train.start.origins import child_run, fields_from_model
from phalanx.train.start.prepare import prepare_run, resolve_with_data

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
    else:
        refuse_given(("check_steps",), "is for --check-layout")
    shown = explained if options.check_layout is None else trouble
    with shown(DataError, RunDirectoryError):
        spec, run_file = _read_requested_run(place, options)
    if options.check_layout is not None:
        sys.exit(compare_layouts(spec, run_file, options.check_layout, options.check_steps, options.as_json))
    if started_as_rank(os.environ):
        sys.exit(train_as_rank(spec, run_file, options.as_json))
    if spec.fleet.nodes:
        from phalanx.cli.train.train_fleet import train_fleet

        sys.exit(train_fleet(spec, run_file, options.faults, options.as_json))
    if options.faults or options.spares:
        raise click.UsageError(f"{'--fault' if options.faults else '--spares'} needs a fleet: add --nodes N")
    sys.exit(_train_here(spec, run_file, options.as_json))


def _read_requested_run(place: Path | None, options: TrainOptions) -> tuple[RunSpec, Path]:
    """Return the run of the command line, and the path of its run file, for messages.

    ``place`` is a run file or a run directory, which continues; with --from a directory, of which this is a
    child run; with --from-model a run file or None. Raises ``click.UsageError`` if options are missing or
    contradict each other, and ``RunFileError``.
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
    """Train a run on the ranks of this machine, or report it if it is complete. Return the exit code.

    Prints where it trains and how it differs from earlier starts. Raises ``click.ClickException``.
    """

    console = session.console_for(as_json)
    with explained(DataError, RunDirectoryError):
        if spec.run_dir and (result := RunDirectory(Path(spec.run_dir)).complete_result(spec)) is not None:
            return session.report_finished(spec, run_file, result, console, as_json)
        ranks = ranks_on_this_machine(spec, run_file)
        run = prepare_run(spec, run_file, session.progress_on(console))
    console.print(
        f"run directory {run.directory.path}, {ranks} {'rank' if ranks == 1 else 'ranks'} on this machine",
        soft_wrap=True,
    )
    session.print_beginning(spec, run, console)
    for change in run.layout_changes:
        console.print(
            f"another layout than before: {change}; the bits of the weights depend on it", style="yellow"
        )
    ending = run_locally(run, ranks, session.event_display(run, console), session.print_on(console))
    os.close(run.lock_fd)
    return session.conclude(run, ending, console, as_json, None)


def train_as_rank(spec: RunSpec, run_file: Path, as_json: bool) -> int:
    """Join the other ranks, let rank 0 prepare the run, and train. Return the exit code: 0, or ``EXIT_STOPPED``.

    After an error it is printed, and the process exits at once with ``EXIT_FAILED``. Rank 0 shows the events, and
    prints the result if ``as_json``.
    """
    set_for_rank()
    from phalanx.parallel.process_group.rendezvous import device_for, join, leave, rank_from_environment

    first, stop = False, StopRequest((signal.SIGTERM, signal.SIGINT))
    stop.end_at_once()
    try:
        place = rank_from_environment(os.environ)
        assert place is not None
        first = place.rank == 0
        if place.local_rank == 0 and place.ranks > 1:
            whom = "the other ranks" if first else "rank 0"
            where = place.meeting_point.removeprefix("tcp://")
            print(
                f"rank {place.rank} of {place.ranks} waits for {whom} at {where}", file=sys.stderr, flush=True
            )
        join(place, device_for(spec.runtime.device, place.local_rank), group_timeout_s(spec))
        run_dir, attempt = _agree(spec, run_file, first)
        log = RunDirectory(run_dir).log(attempt, place.rank)
        also_log(order_for(log, f"rank-{place.rank:05d}", attempt, spec.observe)).rank = place.rank
        follower = _follow(run_dir, attempt, as_json) if first else None
        result = run_rank(run_dir, attempt, stop)
        if follower is not None:
            follower()
        leave()
    except BaseException as error:
        try:
            if isinstance(error, (RunFileError, *known_errors())):
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        finally:  # Also if the error cannot be printed.
            os._exit(EXIT_FAILED)  # A clean exit would wait for ranks that wait for this one.
    if result is None:
        return EXIT_STOPPED
    if first and as_json:
        print(json.dumps(result.to_json()), flush=True)
    return 0


def _agree(spec: RunSpec, run_file: Path, first: bool) -> tuple[Path, int]:
    """Return the run directory and attempt that rank 0 (``first``) has prepared; a collective.

    If it could not, it prints the error and every process exits with ``EXIT_FAILED``.
    """
    from phalanx.parallel.process_group.typed_gather import broadcast_typed

    run_dir, attempt = "", 0
    if first:
        try:
            run = prepare_run(spec, run_file, lambda _label, _done, _total: None)
            run_dir, attempt = str(run.directory.path), run.attempt
        except Exception as error:
            # Print the error, if possible, before the other ranks, which wait for an answer, end.
            with suppress(OSError):
                print(f"error: {error}", file=sys.stderr, flush=True)
    run_dir, attempt = broadcast_typed((run_dir, attempt), tuple[str, int])
    if not run_dir:
        os._exit(EXIT_FAILED)  # Rank 0 has printed the reason.
    return Path(run_dir), attempt


def _follow(run_dir: Path, attempt: int, as_json: bool) -> Callable[[], None]:
    """Show the run's events of this attempt and later as plain lines, from a thread. Return a function that ends
    it.

    That waits at most 5 s for the last lines.
    """
    ended = False
    events = RunDirectory(run_dir).events
    events.touch()
    own_events = (event for event in follow(events, lambda: ended) if event.attempt >= attempt)
    console = session.console_for(as_json)
    thread = Thread(target=show_events, args=(own_events, console, False), daemon=True)
    thread.start()

    def end() -> None:
        nonlocal ended
        ended = True
        thread.join(timeout=5.0)

    return end


def compare_layouts(spec: RunSpec, run_file: Path, layout: str, steps: int, as_json: bool) -> int:
    """Train ``steps`` steps on the layout of ``spec``, and with the fields of ``layout``, and print if all bits
    agree, or as JSON.

    Return 0 if they do, else 1. ``layout`` is a list of fields of [parallel], such as "tensor=2,ranks=4". Files are
    temporary. Raises ``TroubleError`` if a side cannot be trained.
    """
    kinds = (DataError, ReplayError, RunDirectoryError)
    with trouble(*kinds):
        sides = [_side(spec, run_file), _other_side(spec, layout, run_file)]
        replays: list[Replay] = []
        with tempfile.TemporaryDirectory(prefix="phalanx-check-") as folder:
            for name, side in zip("AB", sides, strict=True):
                click.echo(
                    f"{name}: {'1 step' if steps == 1 else f'{steps} steps'} on {_text(side.layout)}",
                    err=True,
                )
                before = side.spec.checkpoint
                origin = before.init_from if before.init_with == "training" else ""
                order = ReplayOrder((step_of(Path(origin)) or 0) + steps)
                place = Path(folder) / name
                replays.append(replay_locally(side.spec, order, side.layout.ranks, place, side.data))
    layouts = [side.layout for side in sides]
    compared = compare_replays(*replays)
    numbers = list(_numbers(*replays))
    equal = compared.parting is None and not numbers
    if as_json:
        parting = (
            None
            if compared.parting is None
            else msgspec.to_builtins(compared.parting) | {"text": str(compared.parting)}
        )
        report = {"equal": equal, "steps": steps, "layouts": layouts, "parting": parting, "numbers": numbers}
        click.echo(
            msgspec.json.encode(report | {"compared": compared.observations, "left_out": compared.left_out})
        )
    else:
        one_run = identity(sides[0].spec) == identity(sides[1].spec)
        for line in _lines(compared, layouts, numbers, one_run=one_run):
            click.echo(line)
    return 0 if equal else 1


@dataclass(frozen=True)
class _Side:
    """A resolved run, its layout, and the fingerprint of its data."""

    spec: RunSpec
    layout: Layout
    data: str


def _side(spec: RunSpec, run_file: Path) -> _Side:
    ranks = ranks_on_this_machine(spec, run_file)
    resolved, places = resolve_with_data(spec, run_file, session.progress_on(session.console_for(True)))
    return _Side(resolved, layout_of(resolved.parallel, ranks), index_of_places(places).fingerprint)


def _other_side(spec: RunSpec, layout: str, run_file: Path) -> _Side:
    """Return the run with the fields of ``layout``. Raises ``click.ClickException`` for errors in them, naming the
    option.
    """
    try:
        return _side(override(spec, list(_fields(layout)), run_file), run_file)
    except RunFileError as error:
        raise click.ClickException(f'--check-layout "{layout}": {error}') from error


def _fields(layout: str) -> Iterator[str]:
    """Yield the fields of a layout such as "tensor=2, pipeline_split=[3, 1]" as ``parallel.FIELD=VALUE``.

    Raises ``click.ClickException`` for an empty list, a field of another section, or one without a value.
    """
    words = [word.strip(" ,") for word in re.split(r",(?=\s*[\w.]+\s*=)", layout)]
    if not any(words):
        raise click.ClickException('--check-layout names no field of [parallel], such as "tensor=2,ranks=4"')
    for word in filter(None, words):
        name, sign, _ = word.removeprefix("parallel.").partition("=")
        if not sign:
            raise click.ClickException(
                f'--check-layout: "{word}" is not of the form field=value, such as "tensor=2,ranks=4"'
            )
        if "." in name:
            raise click.ClickException(
                f"--check-layout: {name} is no field of [parallel]; it is the same on both layouts, and --set gives it to both"
            )
        yield f"parallel.{word.removeprefix('parallel.')}"


def _lines(
    compared: Compared, layouts: list[Layout], numbers: list[tuple[int, str, float, float]], one_run: bool
) -> Iterator[str]:
    """Yield the lines of the report: both layouts, if and where they part, the numbers that differ, and what was
    not compared.

    If they part, ``one_run`` decides the explanation: True if both are layouts of one run, whose bits should be equal.
    """
    yield from (f"{name}  {_text(layout)}" for name, layout in zip("AB", layouts, strict=True))
    yield f"{compared.observations:,} tensors compared" + (
        "" if compared.parting is None else ", up to the first that differs"
    )
    if compared.parting is None and not numbers:
        yield "the layouts agree in every bit"
    if compared.parting is not None:
        yield f"the layouts part at {compared.parting}"
        if one_run:
            yield "they are layouts of one run, so every bit should be equal: its promise is broken here"
        else:
            yield "they divide the model in other ways (context, tensor or expert degrees), which decides how sums are split; model.lanes frees the bits of tensor and expert degrees, model.context_tiles of context degrees"
    for step, name, left, right in numbers:
        yield f"  step {step}: {name} {number_text(left)} on A, {number_text(right)} on B"
    yield from left_out_lines(compared)


def _numbers(first: Replay, other: Replay) -> Iterator[tuple[int, str, float, float]]:
    """Yield (step, name, first, other) of the losses and gradient norms that differ in a bit, in the steps of both."""
    for step in sorted(first.numbers.keys() & other.numbers.keys()):
        for name, left in first.numbers[step].items():
            right = other.numbers[step][name]
            if bits(left) != bits(right):
                yield step, name, left, right


def _text(layout: Layout) -> str:
    degrees = layout.degrees | {"expert": layout.expert}
    divided = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    ranks = "1 rank" if layout.ranks == 1 else f"{layout.ranks} ranks"
    return f"{ranks}: {divided}" if divided else ranks

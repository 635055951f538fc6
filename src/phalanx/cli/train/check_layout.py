"""``phalanx train --check-layout``: a few steps on two layouts, and the first difference between them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import trouble
from phalanx.cli.output import left_out_lines, number_text
from phalanx.cli.train.session import console_for, progress_on
from phalanx.data.errors import DataError
from phalanx.data.reading.sources import index_of_places
from phalanx.launch.local import ReplayError, ranks_on_this_machine, replay_locally
from phalanx.run.directory.paths import RunDirectoryError, step_of
from phalanx.run.fields import RunFileError
from phalanx.run.identity import identity
from phalanx.run.layout import Layout, layout_of
from phalanx.run.read import override
from phalanx.run.spec import RunSpec
from phalanx.train.compare.observation import Compared, Replay, ReplayOrder, compare_replays
from phalanx.train.compare.runs import bits
from phalanx.train.start.prepare import resolve_with_data


def compare_layouts(spec: RunSpec, run_file: Path, layout: str, steps: int, as_json: bool) -> int:
    """Train ``steps`` steps on the layout of ``spec``, and on it with the fields of ``layout``, and print whether all bits agree.

    Return 0 if they do, else 1. ``layout`` is a list of fields of [parallel], such as "tensor=2,ranks=4". No files are left on the
    disk.
    Raises ``TroubleError`` if a side cannot be trained.
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
    resolved, places = resolve_with_data(spec, run_file, progress_on(console_for(True)))
    return _Side(resolved, layout_of(resolved.parallel, ranks), index_of_places(places).fingerprint)


def _other_side(spec: RunSpec, layout: str, run_file: Path) -> _Side:
    """Return the run on the other layout. Errors in it are reported for the option, not for the file."""
    try:
        return _side(override(spec, list(_fields(layout)), run_file), run_file)
    except RunFileError as error:
        raise click.ClickException(f'--check-layout "{layout}": {error}') from error


def _fields(layout: str) -> Iterator[str]:
    """Yield the fields of a layout such as "tensor=2, pipeline_split=[3, 1]", each with its section. Raises ``click.ClickException``."""
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
    """Yield the lines of the report: layouts, where they part, and why that may be."""
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
    """Yield the losses and gradient norms that differ, with their steps."""
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

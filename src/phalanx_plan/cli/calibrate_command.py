"""``phalanx calibrate``: measure this machine and write the constants that its plans use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained
from phalanx.command_help import Command
from phalanx.process.this_process import host_name

if TYPE_CHECKING:
    from phalanx.run.fields import JsonObject
    from phalanx.run.spec import RunSpec
    from phalanx.train.measure.calibrate import Clock, Settings
    from phalanx_plan.fit_profile import CalibrationOrigin


@click.command("calibrate", cls=Command)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; by default, that of --cluster this.",
)
@click.option(
    "--ranks", type=click.IntRange(min=1), help="Ranks of this machine; by default one for each GPU or core."
)
@click.option("--quick", is_flag=True, help="Fewer points: half a minute rather than some minutes.")
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    help="By default cpu on a CPU that others use too, else wall.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the tables as one JSON object.")
def command(out: Path | None, ranks: int | None, quick: bool, clock: Clock | None, as_json: bool) -> None:
    """Measure this machine: products, attention, memory, collectives, copies, disk, and real training steps.

    Leave the machine alone meanwhile. What is written is a cluster of --ranks accelerators (on a CPU, cores).

    \b
      phalanx calibrate
      phalanx calibrate --quick --out my-node.toml
      phalanx plan layout run.toml --cluster my-node.toml
      phalanx plan layout run.toml --cluster this
    """
    import tomli_w

    from phalanx.hardware.catalog import this_machine
    from phalanx.hardware.cluster import HardwareError

    with explained(HardwareError, RuntimeError):
        target = out or this_machine()
        tables = _measure(ranks, quick, clock, quiet=as_json)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(tomli_w.dumps(tables), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(tables))
    else:
        _print(tables)
        click.echo(f"wrote {target}")


def _measure(ranks: int | None, quick: bool, clock: Clock | None, *, quiet: bool) -> JsonObject:
    """Measure kernels, collectives and training steps of this machine, and return the tables of its TOML file.

    ``ranks`` None means all GPUs, or all cores without GPUs. Takes minutes. Progress is printed unless ``quiet``.
    Raises ClickException for a GPU that the catalog lacks.
    """
    from phalanx.checkpoint.snapshot.segments import total_memory_bytes
    from phalanx.hardware.catalog import accelerator
    from phalanx.hardware.local.device import device_name, device_of_rank, gpus
    from phalanx.train.measure import calibrate
    from phalanx_plan.fit_profile import fit_profile, to_tables

    device = device_of_rank(0)
    settings = calibrate.Settings(device, clock or calibrate.usual_clock(device), quick)
    count = ranks or (gpus() or calibrate.cores())
    gpu = device_name(device)
    key = "cpu" if gpu is None else _key(gpu)
    _say(quiet, f"products, attention, memory, copies, disk (clock: {settings.clock})")
    points = calibrate.operations(settings)
    for members in sorted({2, count}) if count > 1 else ():
        _say(quiet, f"collectives of {members} ranks")
        for name, collective_points in calibrate.measure_collectives(settings, members).items():
            points.setdefault(name, []).extend(collective_points)
    origin = _origin(settings)
    memory_bytes = float(total_memory_bytes())
    tables = to_tables(fit_profile(points, accelerator(key), origin), count, memory_bytes, origin)
    _say(quiet, "training steps")
    tables["profile"]["stack"] = _stack_scalar(tables, settings, origin)
    return tables


def _say(quiet: bool, work: str) -> None:
    """Print what is being measured on standard error, unless ``quiet``."""
    if not quiet:
        click.echo(f"measuring {work} ...", err=True)


def _key(device_name: str) -> str:
    """Return the catalog key of the accelerator that a driver calls ``device_name``; the longest matching name wins.

    Raises ClickException if there is none.
    """
    from phalanx.hardware.catalog import accelerators

    matches = [
        (len(part), key)
        for key, chip in accelerators().items()
        for part in chip.device_names
        if part in device_name
    ]
    if not matches:
        raise click.ClickException(
            f"the catalog has no {device_name!r}: describe it under [accelerator] in a TOML file of your own"
        )
    return max(matches)[1]


def _origin(settings: Settings) -> CalibrationOrigin:
    """Return the source (host and clock), today's date in UTC, and the versions of phalanx, torch and the platform."""
    import datetime
    import platform

    import torch

    from phalanx.version import __version__
    from phalanx_plan.fit_profile import CalibrationOrigin

    clock = "processor time, since others used the machine too" if settings.clock == "cpu" else "wall time"
    return CalibrationOrigin(
        source=f"measured on {host_name()} by phalanx calibrate ({clock})",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        versions=f"phalanx {__version__}, torch {torch.__version__}, {platform.platform()}",
    )


def _stack_scalar(tables: JsonObject, settings: Settings, origin: CalibrationOrigin) -> JsonObject:
    """Return the median ratio of measured to predicted step time, for one rank alone and for all ranks of the
    machine.

    This is the overhead that the formulas omit. Also returns the number of ratios, and their median relative
    deviation from the medians. Trains the runs.
    """
    import statistics

    scalars: JsonObject = {"source": origin.source, "date": origin.date, "points": 0}
    errors = []
    for name, ranks in {"time_scalar": 1, "time_scalar_together": tables["system"]["per_node"]}.items():
        ratios = _ratios(tables, settings, ranks)
        scalars[name] = statistics.median(ratios)
        scalars["points"] += len(ratios)
        errors += [abs(scalars[name] / ratio - 1) for ratio in ratios]
    return {**scalars, "median_error": statistics.median(errors)}


def _ratios(tables: JsonObject, settings: Settings, ranks: int) -> list[float]:
    """Train each small run on ``ranks`` ranks; return measured over predicted step time, by processor or wall time as the clock is."""
    import tempfile

    import tomli_w

    from phalanx.hardware.catalog import cluster
    from phalanx.train.measure.calibrate import measure_step
    from phalanx_plan.search.layout_text import estimate_written

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "this.toml"
        path.write_text(tomli_w.dumps(tables), encoding="utf-8")
        machine = cluster(f"{path}:{ranks}")
        ratios = []
        for spec in _real_runs(ranks, settings):
            measured = measure_step(spec, ranks)
            measured_s = measured.cpu_s if settings.clock == "cpu" else measured.wall_s
            ratios.append(measured_s / estimate_written(spec, machine, ranks).step_s)
    return ratios


def _real_runs(ranks: int, settings: Settings) -> list[RunSpec]:
    """Return runs of small models of different width and depth, 2 or 4 slots a rank; only the first if ``settings.quick``."""
    from phalanx.run.kinds.whole_model import resolve
    from phalanx.run.spec import ModelSpec, PrecisionSpec, RunSpec, TrainSpec

    precision = PrecisionSpec(compute="fp32" if settings.device.type == "cpu" else "bf16")
    shapes = [(4, 256, 704, 2), (2, 512, 1408, 2), (6, 192, 512, 4)]
    return [
        RunSpec(
            model=resolve(ModelSpec(layers=layers, dim=dim, heads=dim // 64, ffn_dim=inner, vocab_size=4096)),
            train=TrainSpec(batch_size=batch * ranks, slots=batch * ranks, seq_len=256, micro_batch_size=1),
            precision=precision,
        )
        for layers, dim, inner, batch in shapes[: 1 if settings.quick else None]
    ]


def _print(tables: JsonObject) -> None:
    """Print the measured peak rates, the points and median error of each fit that has points, and the ratio of training steps."""
    chip, profile = tables["accelerator"], tables["profile"]
    rates = ", ".join(f"{name} {rate / 1e9:,.4g} GFLOP/s" for name, rate in chip["flops"].items())
    click.echo(f"{chip['name']}: {rates}, memory {chip['memory_bytes_per_s'] / 1e9:,.3g} GB/s")
    fits = {f"matmul {name}": fit for name, fit in profile["matmul"].items()} | profile["collectives"]
    for name, fit in {**fits, "attention": profile["attention"], "memory-bound": profile["memory"]}.items():
        if fit.get("points"):
            click.echo(f"  {name:<16}{fit['points']:>4} points, median error {fit['median_error']:.1%}")
    stack = profile["stack"]
    click.echo(
        f"  {'training step':<16}{stack['points']:>4} points, {stack['time_scalar']:.3g} times the formulas' prediction "
        f"({stack['time_scalar_together']:.3g} with all ranks at work), "
        f"median error {stack['median_error']:.1%}"
    )

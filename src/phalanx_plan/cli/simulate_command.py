"""``phalanx simulate``: the fleet's control plane and a service's router under a simulated clock, and the time of a start."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import click

from phalanx.cli.errors import refuse_given, seed_range
from phalanx.command import AsJson, Heading, Option, command_options
from phalanx.command_help import CommandGroup
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.plugins import load_plugin
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, ValueRange
from phalanx_plan.simulate.hostile.run import run_seed
from phalanx_plan.simulate.large import LEVELS, FleetReport, OnProgress, Scenario, simulate
from phalanx_plan.simulate.spares import SeatsKept
from phalanx_plan.whole_run.failures import DEFAULT_RATE
from phalanx_plan.whole_run.recovery import MEASURED, Start, read_s, start

_PAUSE_S = 3.0


@click.group("simulate", cls=CommandGroup)
def command() -> None:
    """Simulate a fleet or a service with the code that decides in a real one, or how long a start takes.

    \b
      phalanx simulate start
      phalanx simulate fleet --nodes 2000
    """


if (_traffic := load_plugin("phalanx.simulations", "traffic")) is not None:
    command.add_command(_traffic)


@dataclass(frozen=True, kw_only=True)
class SimulateFleetOptions:
    nodes: Annotated[int, ValueRange(at_least=2), Heading("Large fleet")] = 12500
    """Nodes of 8 that hold ranks."""
    spares: Annotated[int | None, NOT_NEGATIVE] = None
    """Nodes more; 1 % of the nodes if left out."""
    days: Annotated[float, ValueRange(above=0)] = 30.0
    seed: Annotated[int, Option(show_default=True)] = 0
    rate: Annotated[float, ValueRange(above=0)] = DEFAULT_RATE
    """Failures per 1,000 node-days; published fleets had 2.34 to 6.50."""
    step_s: Annotated[float, ValueRange(above=0)] = 10.0
    unit: Annotated[int, POSITIVE] = 1
    """Nodes that talk most; with more than one, print how well the choice of spares keeps them together."""
    spares_together: Annotated[int, NOT_NEGATIVE, Option(show_default=True)] = 0
    """So many spares lie together, all over the fleet; 0: they are the last nodes."""
    small: Annotated[bool, Heading("Small worlds")] = False
    """Small worlds in which everything fails, checked after every event."""
    seeds: str = "0:100"
    """Which small worlds, FIRST:END."""
    as_json: AsJson = False


@command.command("fleet")
@command_options(SimulateFleetOptions)
def fleet(options: SimulateFleetOptions) -> None:
    """A large fleet under published failure rates, or many small ones under hostile faults.

    \b
      phalanx simulate fleet --nodes 2000
      phalanx simulate fleet --nodes 12500 --days 30 --seed 7
      phalanx simulate fleet --nodes 2000 --spares 0 --rate 6.5 --json
      phalanx simulate fleet --nodes 12500 --unit 4 --spares-together 4
      phalanx simulate fleet --small --seeds 0:1000
    """
    if options.small:
        large = ("nodes", "spares", "days", "seed", "rate", "step_s", "unit", "spares_together")
        refuse_given(large, "is for a large fleet: leave out --small")
    else:
        refuse_given(("seeds",), "is for --small")
    progress = _progress("worlds" if options.small else "days")
    try:
        if options.small:
            _small(seed_range(options.seeds), options.as_json, progress)
            return
        spares = options.nodes // 100 if options.spares is None else options.spares
        if options.nodes % options.unit:
            raise click.BadParameter(
                f"{options.nodes} nodes are not whole units of {options.unit}", param_hint="--unit"
            )
        scenario = Scenario(
            *(options.nodes, spares, options.days, options.seed, options.rate, options.step_s),
            unit=options.unit,
            spares_together=options.spares_together,
        )
        report = simulate(scenario, progress)
    except BrokenInvariant as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(dataclasses.asdict(report)) if options.as_json else _format(report))


def _progress(unit: str) -> OnProgress:
    """Return a callback that prints the progress on stderr at most once per ``_PAUSE_S``; a shorter simulation prints nothing."""
    last_s = time.monotonic()

    def show(finished: float, total: float) -> None:
        """Print the progress on standard error, at most once per pause."""
        nonlocal last_s
        if time.monotonic() - last_s > _PAUSE_S:
            last_s = time.monotonic()
            click.echo(f"simulated {finished:,.3g} of {total:,g} {unit}", err=True)

    return show


def _small(seeds: range, as_json: bool, on_progress: OnProgress) -> None:
    """Simulate a hostile world for each seed; print counts of faults, recoveries and successions, as text or JSON.

    Raises the error of the first world that breaks an invariant.
    """
    began_s = time.monotonic()
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    worst = 0
    for seed in seeds:
        outcome = run_seed(seed)
        faults.update(outcome.faults)
        totals.update(
            recoveries=outcome.recoveries,
            regroups=outcome.regroups,
            successions=outcome.successions,
            events=outcome.events,
        )
        worst = max(worst, outcome.worst_lost_steps)
        on_progress(seed + 1 - seeds.start, len(seeds))
    seconds = time.monotonic() - began_s
    result = {
        "worlds": len(seeds),
        "faults": dict(faults.most_common()),
        **totals,
        "most_steps_lost_from_memory": worst,
        "seconds": seconds,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(
            f"{len(seeds)} worlds, {faults.total()} faults, {totals['recoveries']} recoveries, {totals['regroups']} planned "
            f"changes, {totals['successions']} successions of a lost head, {totals['events']} events: no broken invariant ({len(seeds) / seconds:.1f} worlds/s)"
        )


def _format(report: FleetReport) -> str:
    """Return the report of a large fleet as text."""
    scenario = report.scenario
    causes = ", ".join(f"{name} {count}" for name, count in report.failures.items())
    lines = [
        f"{scenario.nodes:,} nodes of 8 and {scenario.spares} spares, {scenario.days:g} days, {scenario.rate:g} failures per "
        f"1,000 node-days, seed {scenario.seed}",
        f"failures       {sum(report.failures.values()):,} ({report.of_members:,} of members): {causes}",
        f"recoveries     {report.recoveries:,} in {report.mean_recovery_s:.1f} s on average; epochs restored from memory "
        f"{report.from_memory:,}, from disk {report.from_disk:,}; planned changes {report.regroups:,}",
        f"spares         at least {report.fewest_spares} ready at any turn",
        f"steps          {report.steps:,} of {scenario.step_s:g} s",
        f"goodput        {100 * report.goodput:.3f} %",
        *(_kept(name, kept) for name, kept in report.units_kept.items()),
        "",
        *_shares(report.buckets_s, report.elapsed_s),
        "",
        *_shares(report.node_s, sum(report.node_s.values())),
    ]
    return "\n".join(lines)


def _kept(name: str, kept: SeatsKept) -> str:
    """Return a line on how many units leave their domain, and where nodes are replaced."""
    torn = ", ".join(
        f"{units:.1f} their {level}" for level, units in zip(LEVELS, kept.torn_units, strict=True)
    )
    near = ", ".join(
        f"{share:.0%} in the same {level}" for level, share in zip(LEVELS, kept.replaced_near, strict=True)
    )
    return f"{name:<14} units that leave, on average: {torn}; of {kept.replaced:,} seats replaced {near}"


def _shares(seconds: dict[str, float], whole_s: float) -> list[str]:
    """Return lines of seconds and shares, the largest first, with the total."""
    rows = [*sorted(seconds.items(), key=lambda row: -row[1]), ("total", whole_s)]
    return [f"{name:<20} {value:>18,.1f} s {100 * value / whole_s:>8.3f} %" for name, value in rows]


# ``phalanx simulate start``: the time of a run of so many nodes from its launch to its first step.


_NODES = (1, 100, 1_000, 10_000, 25_000)


@dataclass(frozen=True, kw_only=True)
class SimulateStartOptions:
    nodes: tuple[Annotated[int, POSITIVE], ...] = ()
    """May be repeated; by default 1 to 25,000."""
    workers: Annotated[int, POSITIVE] = 8
    """Workers of each node."""
    files: Literal["local", "shared"] = "local"
    """Where Python and its packages lie: on every node, or on one file system for all."""
    file_calls_per_s: Annotated[
        float | None,
        ValueRange(above=0),
        Option(
            text=f"Of the shared file system, for all nodes; by default {MEASURED.file_calls_per_s.value:,.0f}."
        ),
    ] = None
    by_ssh: bool = False
    """The launcher logs into every node: phalanx submit --on ssh."""
    checkpoint_gb: Annotated[float, NOT_NEGATIVE] = 0.0
    """Size of the checkpoint that is read; 0 for none."""
    storage_gb_per_s: Annotated[float, ValueRange(above=0)] = 2000.0
    """Rate of its storage, for all nodes (Llama 3: 2 TB/s sustained)."""
    node_gb_per_s: Annotated[float, ValueRange(above=0)] = 50.0
    """Rate at which one node reads."""
    warmup_s: Annotated[float, NOT_NEGATIVE] = 0.0
    """Compilation, and what the first step takes longer."""
    as_json: AsJson = False


@command.command("start")
@command_options(SimulateStartOptions)
def start_command(options: SimulateStartOptions) -> None:
    """The time from the launch to the first step, phase by phase: a closed form with measured costs of one node or rank.

    Agents attach while their workers import; the shorter of the two is hidden, and marked so. The wait for a scheduler's nodes is not counted, nor
    is a scheduler's own start of so many tasks.

    \b
      phalanx simulate start
      phalanx simulate start --nodes 12500 --files shared --checkpoint-gb 5700
      phalanx simulate start --nodes 500 --by-ssh --json
    """

    costs = MEASURED
    if options.file_calls_per_s is not None:
        file_calls = replace(
            costs.file_calls_per_s, value=options.file_calls_per_s, source="--file-calls-per-s"
        )
        costs = replace(costs, file_calls_per_s=file_calls)
    starts = [
        start(
            count,
            options.workers,
            files=options.files,
            by_ssh=options.by_ssh,
            restore_s=read_s(options.checkpoint_gb, count, options.storage_gb_per_s, options.node_gb_per_s),
            warmup_s=options.warmup_s,
            costs=costs,
        )
        for count in options.nodes or _NODES
    ]
    click.echo(
        json.dumps([_as_json(start_time) for start_time in starts])
        if options.as_json
        else "\n".join(_table(starts))
    )


def _as_json(start_time: Start) -> dict[str, object]:
    """Return a start's nodes, total and phases in seconds; ``hidden`` marks the phase that overlaps another."""
    phases = [
        {
            "phase": phase.name,
            "s": phase.duration_s,
            "source": phase.source,
            "hidden": phase.name == start_time.hidden,
        }
        for phase in start_time.phases
    ]
    return {"nodes": start_time.nodes, "total_s": start_time.total_s, "phases": phases}


def _table(starts: list[Start]) -> list[str]:
    """Return the lines of a table of starts by phase, in seconds, one column for each size, with the sum, and a line
    that explains brackets: times that another phase hides.
    """
    lines = [f"{'seconds, nodes:':<18}" + "".join(f"{start_time.nodes:>12,}" for start_time in starts)]
    for index, phase in enumerate(starts[0].phases):
        cells = (
            f"({start_time.phases[index].duration_s:,.1f})"
            if phase.name == start_time.hidden
            else f"{start_time.phases[index].duration_s:,.1f}"
            for start_time in starts
        )
        lines.append(f"{phase.name:<18}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append(f"{'in all':<18}" + "".join(f"{start_time.total_s:>12,.1f}" for start_time in starts))
    return [*lines, "(in brackets: hidden by a phase that runs at the same time)"]

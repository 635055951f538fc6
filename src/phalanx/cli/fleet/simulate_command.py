"""``phalanx simulate``: the fleet's control plane under a simulated clock."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter

import click

from phalanx.cli.fleet.simulate_start import command as start_command
from phalanx.cli.fleet.simulate_traffic import command as traffic_command
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.simulate.hostile.run import run_seed
from phalanx.simulate.large import LEVELS, FleetReport, OnProgress, Scenario, simulate
from phalanx.simulate.rates import DEFAULT_RATE
from phalanx.simulate.spares import SeatsKept

_PAUSE_S = 3.0


@click.group("simulate")
def command() -> None:
    """Simulate a fleet or a service with the code that decides in a real one, or how long a start takes."""


command.add_command(start_command)
command.add_command(traffic_command)


@command.command("fleet")
@click.option(
    "--nodes", default=12_500, show_default=True, type=click.IntRange(2), help="Nodes of 8 that hold ranks."
)
@click.option("--spares", type=click.IntRange(0), help="Nodes more; 1 % of the nodes if left out.")
@click.option("--days", default=30.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--rate",
    default=DEFAULT_RATE,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Failures per 1,000 node-days; published fleets had 2.34 to 6.50.",
)
@click.option("--step-s", default=10.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option(
    "--unit",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Nodes that talk most; with more than one, tell how well the choice of spares keeps them together.",
)
@click.option(
    "--spares-together",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="So many spares lie together, all over the fleet; 0: they are the last nodes.",
)
@click.option(
    "--small", is_flag=True, help="Small worlds in which everything fails, checked after every event."
)
@click.option("--seeds", default="0:100", show_default=True, help="Which small worlds, FIRST:END.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fleet(
    nodes: int,
    spares: int | None,
    days: float,
    seed: int,
    rate: float,
    step_s: float,
    unit: int,
    spares_together: int,
    small: bool,
    seeds: str,
    as_json: bool,
) -> None:
    """A large fleet under published failure rates, or many small ones under hostile faults.

    \b
      phalanx simulate fleet --nodes 12500 --days 30 --seed 7
      phalanx simulate fleet --nodes 2000 --spares 0 --rate 6.5 --json
      phalanx simulate fleet --nodes 12500 --unit 4 --spares-together 4
      phalanx simulate fleet --small --seeds 0:1000
    """
    progress = _progress("worlds" if small else "days")
    try:
        if small:
            _small(_range(seeds), as_json, progress)
            return
        spares = nodes // 100 if spares is None else spares
        if nodes % unit:
            raise click.BadParameter(f"{nodes} nodes are not whole units of {unit}", param_hint="--unit")
        scenario = Scenario(
            nodes, spares, days, seed, rate, step_s, unit=unit, spares_together=spares_together
        )
        report = simulate(scenario, progress)
    except BrokenInvariant as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(dataclasses.asdict(report)) if as_json else _format(report))


def _range(seeds: str) -> range:
    first, _, end = seeds.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise click.BadParameter(
            f"{seeds!r} is not FIRST:END with FIRST < END, such as 0:100", param_hint="--seeds"
        )
    return range(int(first), int(end))


def _progress(what: str) -> OnProgress:
    """Returns a callback that says on stderr how far it is, every few seconds; a short simulation says nothing."""
    last_s = time.monotonic()

    def show(done: float, total: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _PAUSE_S:
            last_s = time.monotonic()
            click.echo(f"simulated {done:,.3g} of {total:,g} {what}", err=True)

    return show


def _small(seeds: range, as_json: bool, on_progress: OnProgress) -> None:
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
    torn = ", ".join(
        f"{units:.1f} their {level}" for level, units in zip(LEVELS, kept.torn_units, strict=True)
    )
    near = ", ".join(
        f"{share:.0%} in the same {level}" for level, share in zip(LEVELS, kept.replaced_near, strict=True)
    )
    return f"{name:<14} units that leave, on average: {torn}; of {kept.replaced:,} seats replaced {near}"


def _shares(seconds: dict[str, float], whole_s: float) -> list[str]:
    rows = [*sorted(seconds.items(), key=lambda row: -row[1]), ("total", whole_s)]
    return [f"{name:<20} {value:>18,.1f} s {100 * value / whole_s:>8.3f} %" for name, value in rows]

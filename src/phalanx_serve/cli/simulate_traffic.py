"""``phalanx simulate traffic``: the router of a service under a simulated clock, with every fault."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import click

from phalanx.cli.errors import refuse_given, seed_range
from phalanx.command import FiniteRange
from phalanx.command_help import Command
from phalanx.run.directory.files import read_named
from phalanx_serve.traffic.simulated_world import Load, RouterInvariantError, run_seed


@click.command("traffic", cls=Command)
@click.option("--seeds", default="0:100", show_default=True, help="Which worlds, FIRST:END.")
@click.option(
    "--workers", default=0, type=click.IntRange(0), help="In each world; 0: 1 to 6, drawn from its seed."
)
@click.option("--rate", default=0.0, type=FiniteRange(0), help="Requests a second; 0: drawn.")
@click.option(
    "--faults",
    default=-1.0,
    type=FiniteRange(-1),
    help="Faults a second, for the first 18 s; negative: drawn.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the second of an arrival on each line, instead of random ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(seeds: str, workers: int, rate: float, faults: float, trace: Path | None, as_json: bool) -> None:
    """Simulate services in which workers, gateways, links and pages fail; no token may be lost, repeated or changed.

    \b
      phalanx simulate traffic --seeds 0:1000
      phalanx simulate traffic --seeds 7:8 --workers 300 --rate 50 --json
    """
    if trace is not None:
        refuse_given(("rate",), "--trace has the times of all requests")
    load = Load(workers, rate, faults, _arrivals(trace), str(trace)) if trace else Load(workers, rate, faults)
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    first_token_s, gap_s = [], 0.0
    for seed in seed_range(seeds):
        try:
            outcome = run_seed(seed, load)
        except RouterInvariantError as error:
            raise click.ClickException(str(error)) from error
        counts.update(outcome.counts)
        struck.update(outcome.faults)
        totals.update(worlds=1, requests=outcome.requests, tokens=outcome.tokens, events=outcome.events)
        first_token_s.append(outcome.first_token_s)
        gap_s = max(gap_s, outcome.longest_gap_s)
    seconds = time.monotonic() - began_s
    medians = sorted(median for median, _ in first_token_s)
    result = {
        **totals,
        "faults": dict(struck.most_common()),
        "counts": dict(counts.most_common()),
        "first_token_s": medians[len(medians) // 2],
        "first_token_p99_s": max(late for _, late in first_token_s),
        "longest_gap_s": gap_s,
        "seconds": seconds,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(
            f"{totals['worlds']} worlds, {totals['requests']} requests, {totals['tokens']} tokens, {struck.total()} faults, "
            f"{counts['moved']} moves, {counts['quarantined']} in quarantine: no token lost, doubled or changed, all pages "
            f"given back ({totals['worlds'] / seconds:.1f} worlds/s)"
        )


def _arrivals(trace: Path) -> list[float]:
    """Read the sorted arrival times (s) of a trace, separated by white space.

    Raises BadParameter for an empty file or a time that is no number, negative or infinite.
    """
    try:
        times = sorted(float(line) for line in read_named(trace).split())
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"{trace}: {error}; give seconds, one on a line", param_hint="--trace"
        ) from error
    if not times or not all(0 <= time < float("inf") for time in times):
        raise click.BadParameter(f"{trace}: give at least one second, none below 0", param_hint="--trace")
    return times

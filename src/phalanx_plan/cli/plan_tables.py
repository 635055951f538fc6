"""Terminal output of ``phalanx plan``.

Ranked layouts, their runners-up, one layout term by term, and the run as a whole; the software that the planner knows, with its
published runs; and workers that serve a model's traffic.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.output import text_console
from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import RunSpec
from phalanx_plan.evidence import learned
from phalanx_plan.report.elements import (
    BETWEEN,
    CO2,
    DAYS,
    DOLLARS,
    ENERGY,
    POWER,
    DisplayUnit,
    counted,
    mfu_text,
    unit_for,
    written,
)
from phalanx_plan.search.alternatives import NetworkCost, short
from phalanx_plan.search.plan import Plan
from phalanx_plan.search.query import OWN
from phalanx_plan.search.search import RunnerUp
from phalanx_plan.serving.fleet import ServingFleet, describe, nearest, plan_service
from phalanx_plan.serving.step_cost import rank_token_bytes, requests_held, token_bytes, weight_bytes
from phalanx_plan.serving.workers import DemandError, Service, read_objectives, read_traffic
from phalanx_plan.step_cost.estimate import Estimate
from phalanx_plan.whole_run.estimate import Percentiles, RunEstimate, json_value
from phalanx_plan.workload.software import SOFTWARE, STACKS

_FAMILIES = 12
"""Number of runner-up families that are shown."""


def print_plan(plan: Plan, *, explain: bool) -> None:
    """Print the plan as tables and notes: evidence, ranking and runners-up of a search, placement, and the whole run
    if it fits.

    The breakdown of the chosen layout is printed with ``explain`` or if the user gave the layout.
    """
    console = text_console()
    _print_head(console, plan)
    if plan.aim.layout is None:
        _print_ideas(console, plan)
        console.print(_ranking(plan))
        _print_losers(console, plan)
    _print_placement(console, plan)
    if explain or plan.aim.layout is not None:
        _print_explained(console, plan)
    if plan.chosen.fits:
        console.print(_run_table(plan))
    for note in (*(plan.run.warnings if plan.chosen.fits else ()), *plan.notes):
        console.print(Text.assemble(("note:", "yellow"), f" {note}"))


def _print_head(console: Console, plan: Plan) -> None:
    """Print the evidence, the model, the cluster and its stack, by how many percent step times may differ (P5 to P95),
    cautions, and overridden figures.
    """
    job = plan.job
    counts, cluster = job.workload.counts, job.cluster
    console.print(str(plan.evidence), style="yellow" if plan.evidence.kind == "never" else "dim")
    announced = " (announced, not yet measured by anyone)" if cluster.accelerator.announced_only else ""
    console.print(
        Text.assemble(
            (plan.name, "bold"),
            f": {counted(counts.parameters)} parameters ({counted(counts.active_parameters)} active), "
            f"{job.workload.batch:,} x {job.workload.seq_len:,} tokens a step, {counted(plan.tokens)} tokens",
        )
    )
    console.print(
        f"{cluster.key}: {cluster.accelerators:,} x {cluster.accelerator.name}{announced}; stack {job.stack.name}, "
        f"constants {job.profile.constants.name}; step times are {plan.band.p5 - 1:+.0%} to {plan.band.p95 - 1:+.0%} (P5-P95)"
    )
    for caveat in plan.caveats:
        console.print(Text.assemble(("caution:", "bold yellow"), f" {caveat.text}"))
    for name, value in cluster.overrides.items():
        console.print(f"  {name} = {value:g}, set by you")


def _print_ideas(console: Console, plan: Plan) -> None:
    """Print each of ``plan.ideas`` with its days and dollars without failures, its drawbacks, and the ``--layout`` that selects it."""
    for number, idea in enumerate(plan.ideas, 1):
        days, usd = plan.failure_free(idea.estimate)
        console.print(
            Text.assemble(
                (f"plan {number}", "bold"),
                f": {idea.title}: {written(days, DAYS)} and {written(usd, DOLLARS)} without failures",
            )
        )
        gives_up = "; ".join(idea.gives_up) or "nothing against the others"
        console.print(f"  gives up: {gives_up}")
        console.print(f"  --layout {idea.estimate.layout}", soft_wrap=True)  # users copy it
    console.print()


def _ranking(plan: Plan) -> Table:
    """Return a table of the best layouts: step, MFU, memory, accelerators, time and cost without failures, and the
    network's addition if they were placed. Its caption explains the columns.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, width=min(100, text_console().width))
    days_of, usd_of = zip(*map(plan.failure_free, plan.best), strict=True)
    time, money = unit_for(days_of, DAYS), unit_for(usd_of, DOLLARS)
    network = () if plan.placements is None else ("network ms",)
    for column in ("layout", "step s", *network, "MFU", "GB", "of", "GPUs", time.name, money.name):
        is_layout = column == "layout"
        table.add_column(
            column,
            justify="left" if is_layout else "right",
            no_wrap=True,
            ratio=1 if is_layout else None,
            overflow="ellipsis",
        )
    for estimate, days, usd in zip(plan.best, days_of, usd_of, strict=True):
        table.add_row(
            short(estimate.layout),
            f"{estimate.step_s:.4g}",
            *([] if plan.placements is None else [_added(plan.placements[estimate.layout])]),
            mfu_text(estimate) + (" !" if plan.better_than_published(estimate) else ""),
            f"{estimate.memory_bytes / 1e9:.1f}",
            f"{estimate.capacity_bytes / 1e9:.0f}",
            f"{estimate.ranks:,}",
            time(days, digits=3),
            money(usd, digits=3),
        )
    table.caption = f"{time.name} and {money.name} without failures; the whole run, with them, below"
    if plan.placements is not None:
        table.caption += "; network ms: time that slow uplinks add to a step, included in it"
    if any(plan.better_than_published(estimate) for estimate in plan.best):
        table.caption += "; !: above the best published utilization of this accelerator in this format"
    table.caption_justify = "left"
    return table


def _added(cost: NetworkCost) -> str:
    """Format the milliseconds that the network adds to a step."""
    return f"+{1e3 * cost.added_s:.3g}" if cost.added_s else "0"


def _print_placement(console: Console, plan: Plan) -> None:
    """Print the placement of the chosen layout on the network. Nothing without a placed plan."""
    if plan.placements is None:
        return
    cost = plan.placements[plan.chosen.layout]
    nodes = "node" if cost.unit_nodes == 1 else "nodes"
    price = (
        "no link is slower than those of a node"
        if not cost.added_s
        else (f"{cost.busiest or 'the links of a node'} adds up to {1e3 * cost.added_s:.3g} ms to a step")
    )
    console.print(
        f"placed in {cost.units:,} units of {cost.unit_nodes} {nodes} by {cost.order}, {cost.straddling:,} of them straddling: {price}"
    )


def _print_losers(console: Console, plan: Plan) -> None:
    """Print how much the best layout of each other family loses, least first, at most ``_FAMILIES`` of them.

    Also prints how many layouts each reason excluded. Prints nothing without a search.
    """
    result = plan.search_result
    if result is None:
        return
    table = Table.grid(padding=(0, 2))
    nearest = sorted(result.runners_up, key=lambda runner_up: lost(plan, runner_up))
    for runner_up in nearest[:_FAMILIES]:
        share = lost(plan, runner_up)
        table.add_row(
            f"  {runner_up.family}",
            f"{share:+.1%}" if math.isfinite(share) else "does not fit",
            runner_up.reason,
        )
    measure = {"time": "step", "cost": "accelerator-hours", "gpus": "accelerators"}[plan.aim.optimize]
    console.print(
        Text.assemble(
            ("\nWhat the best of every other family loses", "bold"),
            f" ({measure}; where most of the step's time goes)",
        )
    )
    console.print(table)
    excluded = ", ".join(f"{number:,} by {reason}" for reason, number in result.excluded.items() if number)
    console.print(
        f"{result.looked_at:,} layouts looked at, {result.valid:,} legal and fitting; excluded: {excluded}\n"
    )


def lost(plan: Plan, runner_up: RunnerUp) -> float:
    """Return the relative loss of a runner-up against the winner (0.1 is 10 % worse) in the optimized quantity.

    That is step time, accelerator-hours or accelerators.
    """
    winner = plan.best[0]
    ranks = runner_up.layout.ranks / winner.ranks
    return {"time": runner_up.slower, "cost": (1 + runner_up.slower) * ranks - 1, "gpus": ranks - 1}[
        plan.aim.optimize
    ]


def _print_explained(console: Console, plan: Plan) -> None:
    """Print the layout's memory and time by term and the verdict; after a search, beside the best other layout."""
    result = plan.search_result
    other = (
        next((estimate for estimate in result.best if estimate.layout != plan.chosen.layout), None)
        if result
        else None
    )
    console.print(f"\n{plan.chosen.layout}", style="bold")
    if other is not None:
        console.print(Text.assemble("beside ", (str(other.layout), "bold")))
    console.print(_breakdown("memory", plan.chosen, other))
    console.print(_breakdown("time", plan.chosen, other))
    console.print(_verdict(plan.chosen, other))


def _breakdown(quantity: str, chosen: Estimate, other: Estimate | None) -> Table:
    """Return a table of "memory" in GB or "time" in seconds by term, beside those of the other layout, if given."""
    rows = dict(terms(quantity, chosen, other))
    total = (sum(this for this, _ in rows.values()), sum(that or 0.0 for _, that in rows.values()))
    unit, scale = ("GB", 1e-9) if quantity == "memory" else ("s", 1.0)
    table = Table(
        title=f"{quantity}, {unit}" + (" of the worst rank" if quantity == "memory" else ""),
        title_justify="left",
    )
    for column in ("", "this", "share", *(("other", "difference") if other else ())):
        table.add_column(column, justify="right" if column else "left")
    for name, (this, that) in [*rows.items(), ("total", (total[0], total[1] if other else None))]:
        row = [name.replace("_", " "), f"{this * scale:.4g}", f"{this / total[0]:.1%}"]
        if that is not None:
            row += [f"{that * scale:.4g}", f"{(this - that) * scale:+.3g}"]
        table.add_row(*row, style="bold" if name == "total" else None)
    return table


def terms(
    quantity: str, chosen: Estimate, other: Estimate | None
) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Yield (name, (chosen, other)) for each term that is nonzero in either; seconds or bytes. ``other`` None gives None beside."""
    first: Mapping[str, float] = getattr(chosen, quantity)
    second: Mapping[str, float] = getattr(other, quantity) if other else {}
    for name in dict.fromkeys((*first, *second)):
        pair = first.get(name, 0.0), second.get(name, 0.0)
        if any(pair):
            yield name, (pair[0], pair[1] if other else None)


def _verdict(chosen: Estimate, other: Estimate | None) -> str:
    """Describe spare or missing memory, rates, MFU, and the difference of exact schedule and closed form.

    With ``other``, adds which is quicker, by what share of the step, and the term that differs most.
    """
    room = (chosen.capacity_bytes - chosen.memory_bytes) / 1e9
    text = f"fits with {room:.1f} GB to spare" if chosen.fits else f"does not fit: {-room:.1f} GB too much"
    text += f"; {chosen.tokens_per_s:,.0f} tokens/s, MFU {mfu_text(chosen)}, {chosen.flops_per_s / 1e12:,.4g} TFLOP/s each"
    text += f"; exact schedule against closed form {chosen.step_s / chosen.closed_form_s - 1:+.2%}"
    if other is None:
        return text
    most = max(terms("time", chosen, other), key=lambda term: abs(term[1][0] - (term[1][1] or 0.0)))
    change = chosen.step_s / other.step_s - 1
    winner = "this is the quicker" if change < 0 else "the other is the quicker"
    return f"{text}\n{winner} by {abs(change):.1%} of its step, most of it {most[0].replace('_', ' ')}"


def _run_table(plan: Plan) -> Table:
    """Return a table of the run as a whole."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = "The run as a whole", "left"
    table.add_column(style="dim")
    for name, value in _run_rows(plan.run):
        table.add_row(name, value)
    return table


def _run_rows(run: RunEstimate) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the run as a whole: time, finish, goodput, failures, checkpoints, data, spares, energy
    and cost.

    Data only if its reading is known.
    """
    levels = run.goodput_by_level
    finish = run.finish_days
    time = unit_for([run.days], DAYS)
    yield (
        time.name,
        f"{time(run.days)} ({time(run.failure_free_days)} without failures), {counted(run.tokens_per_day)} tokens a day",
    )
    yield "finish", f"P5 {time(finish.p5)}, P50 {time(finish.p50)}, P95 {time(finish.p95)} {time.name}"
    yield "goodput", f"{run.goodput:.1%} (failure rates low {levels['low']:.1%}, high {levels['high']:.1%})"
    yield (
        "failures",
        f"{_failures(run)}; recovery {run.recovery_s:,.4g} s",
    )
    yield (
        "checkpoints",
        f"every {run.interval_s:,.4g} s into {run.tier.name}, every {run.durable_interval_s:,.4g} s to storage",
    )
    if run.data is not None:
        yield "data", run.data.sentence
    spares = f"{run.spare_nodes:,} nodes ({run.spare_accelerators:,} accelerators)"
    yield (
        "spares",
        f"{spares} beside the cluster's, in energy and cost; --assume spare_nodes=0 for none"
        if run.spare_nodes
        else spares,
    )
    yield (
        "energy",
        f"{written(run.energy.total_kwh, ENERGY)} ({_range(run.energy_kwh, ENERGY)}), {written(run.mean_power_w, POWER)}, "
        f"{written(run.co2_kg, CO2)} CO2",
    )
    yield (
        "cost",
        f"{written(run.cost.total_usd, DOLLARS)} ({_range(run.usd, DOLLARS)}), {run.usd_per_million_tokens:.3g} $ per million tokens",
    )


def _range(percentiles: Percentiles, units: Sequence[DisplayUnit]) -> str:
    return f"P5 {written(percentiles.p5, units)}, P95 {written(percentiles.p95, units)}"


def _failures(run: RunEstimate) -> str:
    """Describe the mean time between failures and the expected number in the run; two digits if below one."""
    if math.isinf(run.mtti_s):
        return "none are expected"
    in_all = f"{run.failures:,.0f}" if run.failures >= 1 else f"{run.failures:.2g}"
    return f"one every {written(run.mtti_s, BETWEEN)}, {in_all} in all"


# ``phalanx plan stacks``.


def print_stacks(*, as_json: bool) -> None:
    """Print every name that ``--stack`` takes, with the published runs of dense models and of mixtures, as a table or JSON."""
    names = tuple(dict.fromkeys((OWN, *SOFTWARE, *STACKS)))
    if as_json:
        records = {
            name: [asdict(record) for record in learned().software if record.software == name]
            for name in names
        }
        unseen = [asdict(record) for record in learned().kinds if record.kind == "never"]
        click.echo(json.dumps({"stacks": records, "without_runs": unseen}))
        return
    table = Table()
    for column in ("stack", "models", "accelerators, published runs of models", "left-out error", "P5-P95"):
        table.add_column(column, justify="left", overflow="fold")
    for name in names:
        for row in _rows(name):
            table.add_row(name, *row)
    text_console().print(table)


def _rows(name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (kind of models, runs by accelerator, left-out error, P5-P95) for dense models and mixtures.

    A stack without runs has one row: the error and band of software that was never seen.
    """
    records = [record for record in learned().software if record.software == name]
    for record in records:
        runs = ", ".join(f"{key} {on.runs} of {on.models}" for key, on in record.accelerators.items())
        low, high = record.ratios[0] - 1, record.ratios[-1] - 1
        kind = "mixtures" if record.mixture else "dense"
        yield kind, runs, f"{record.left_out_error:.0%}", f"{low:+.0%} to {high:+.0%}"
    if not records:
        unseen = learned().kind("never", mixture=False)
        low, high = unseen.ratios[0] - 1, unseen.ratios[-1] - 1
        yield (
            "any",
            "none: as software that was never seen",
            f"{unseen.left_out_error:.0%}",
            f"{low:+.0%} to {high:+.0%}",
        )


# ``phalanx plan serve``: workers that serve a model's traffic, their cost, and the limits of the rejected ones.


def answer_service(
    spec: RunSpec, cluster: Cluster, traffic: str, slo: str, weight_format: str, *, top: int, as_json: bool
) -> None:
    """Plan a service and print it: the ``top`` best fleets, and some that miss the objectives. JSON if ``as_json``.

    Raises ``DemandError``, with the nearest possible fleet, if none meets the objectives.
    """
    demand, objectives = read_traffic(traffic), read_objectives(slo)
    service, name = Service(resolve(spec.model), cluster, demand, objectives, weight_format), spec.name
    good, bad = plan_service(service)
    if not good:
        raise DemandError(nearest(service, bad))
    if as_json:
        click.echo(json.dumps(_json(service, name, good[:top], bad[:top]), allow_nan=False))
        return
    _print(service, name, good, bad[:4], top)


def _json(
    service: Service, name: str, good: list[ServingFleet], bad: list[ServingFleet]
) -> dict[str, object]:
    """Return a service plan for JSON: the finite demands, the fleets that meet them, and those that do not."""
    demand = {
        key: value
        for part in (service.traffic, service.objectives)
        for key, value in dataclasses.asdict(part).items()
        if math.isfinite(value)
    }
    return {
        "model": name,
        "cluster": service.cluster.key,
        "format": service.format,
        "asked": demand,
        "token_bytes": token_bytes(service.model),
        "evidence": _EVIDENCE,
        "answers": [_answer_json(fleet) for fleet in good],
        "refused": [_answer_json(fleet) for fleet in bad],
    }


def _answer_json(answer: ServingFleet) -> dict[str, object]:
    """Return a fleet for JSON; TTFT and TPOT become tables of ``median`` and ``percentile``, in seconds."""
    facts = dataclasses.asdict(answer)
    facts["ttft_s"] = dict(zip(("median", "percentile"), answer.ttft_s, strict=True))
    facts["tpot_s"] = dict(zip(("median", "percentile"), answer.tpot_s, strict=True))
    values: dict[str, object] = json_value(facts)
    return values


_EVIDENCE = (
    "times are of well-tuned software on these kernels' measured constants; python -m bench.serve.planner prints how far published "
    "services were from them"
)


def _print(service: Service, name: str, good: list[ServingFleet], bad: list[ServingFleet], top: int) -> None:
    """Print the best fleet and its memory, a table of the ``top`` best, and the parts of its decode step.

    Then the best fleet with other roles, and each fleet in ``bad`` with its reason.
    """
    console, best, traffic = text_console(), good[0], service.traffic
    context_tokens = traffic.prompt + traffic.text
    console.print(_EVIDENCE, style="dim")
    console.print(
        Text.assemble(
            (name, "bold"),
            f" in {service.format} on {service.cluster.key}: {describe(best)}; {best.accelerators:,} accelerators carry "
            f"{best.rate:,.4g} requests/s ({best.rate * traffic.text:,.4g} tokens/s)",
        )
    )
    weights = weight_bytes(service.model, best.decode, service.format) / 1e9
    room = requests_held(service.model, service.cluster, best.decode, service.format, 8192, context_tokens)
    more = 10e9 / (rank_token_bytes(service.model, best.decode) * context_tokens) * best.decode.data
    console.print(
        f"a rank of decode holds {weights:,.1f} GB of weights; a token's pages take {token_bytes(service.model):,} bytes; a worker has "
        f"room for {room:,} requests of {context_tokens:,.0f} tokens, "
        f"and with 10 GB more on each rank for {more:,.0f} more"
    )
    table = Table()
    for column in ("workers", "gpus", "req/s", "TTFT p50", f"p{100 * service.objectives.percentile:g}"):
        table.add_column(column, justify="left" if column == "workers" else "right", overflow="fold")
    for column in ("TPOT p50", f"p{100 * service.objectives.percentile:g}", "$/M", "J/token"):
        table.add_column(column, justify="right")
    for fleet in good[:top]:
        table.add_row(*_row(fleet))
    console.print(table)
    parts = ", ".join(f"{part} {seconds * 1e3:.3g} ms" for part, seconds in best.parts_s.items())
    console.print(f"the best one's step of decode, nothing overlapped: {parts}")
    other = next((fleet for fleet in good if fleet.roles != best.roles), None)
    if other is not None:
        console.print(
            f"the best with roles {other.roles}: {describe(other)}, {other.accelerators:,} gpus, {other.rate:,.4g} requests/s"
        )
    for fleet in bad:
        console.print(f"not {describe(fleet)}: {fleet.killed}", style="dim")


def _row(answer: ServingFleet) -> tuple[str, ...]:
    """Return a fleet's row of the table: workers (prefill ``>`` decode if apart), GPUs, rate, times, dollars and joules."""
    workers = f"{answer.decode_workers} x {answer.decode}"
    if answer.roles == "apart":
        workers = f"{answer.prefill_workers} x {answer.prefill} > {workers}"
    return (
        workers,
        f"{answer.accelerators:,}",
        f"{answer.rate:,.4g}",
        *(
            f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"
            for seconds in (*answer.ttft_s, *answer.tpot_s)
        ),
        f"{answer.dollars_per_million:,.3g}",
        f"{answer.joules_per_token:,.3g}",
    )

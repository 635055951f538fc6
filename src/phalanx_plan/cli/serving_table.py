"""``phalanx plan serve``: workers that serve a model's traffic, their cost, and the limits of the rejected ones."""

from __future__ import annotations

import dataclasses
import json
import math

import click
from rich.table import Table
from rich.text import Text

from phalanx.cli.output import text_console
from phalanx.hardware.cluster import Cluster
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import RunSpec
from phalanx_plan.serving.fleet import ServingFleet, describe, nearest, plan_service
from phalanx_plan.serving.step_cost import rank_token_bytes, requests_held, token_bytes, weight_bytes
from phalanx_plan.serving.workers import DemandError, Service, read_objectives, read_traffic


def answer_service(
    spec: RunSpec, cluster: Cluster, traffic: str, slo: str, weight_format: str, *, top: int, as_json: bool
) -> None:
    """Plan and print a service. Raises ``DemandError``, with the nearest possible fleet, if none meets the objectives."""
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
    """Return a fleet as plain values for JSON, times by name."""
    facts = dataclasses.asdict(answer)
    facts["ttft_s"] = dict(zip(("median", "percentile"), answer.ttft_s, strict=True))
    facts["tpot_s"] = dict(zip(("median", "percentile"), answer.tpot_s, strict=True))
    return _finite(facts)


def _finite(values: dict[str, object]) -> dict[str, object]:
    """Return the values with ``None`` for infinite ones, for which JSON has no number."""
    return {
        key: _finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in values.items()
    }


_EVIDENCE = (
    "times are of well-tuned software on these kernels' measured constants; python -m bench.serve.planner prints how far published "
    "services were from them"
)


def _print(service: Service, name: str, good: list[ServingFleet], bad: list[ServingFleet], top: int) -> None:
    """Print the best fleet, a table of others, the parts of a step, and fleets that do not meet the objectives."""
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
    """Return a fleet's row of the table."""
    workers = f"{answer.decode_workers} x {answer.decode}"
    if answer.roles == "apart":
        workers = f"{answer.prefill_workers} x {answer.prefill} > {workers}"
    return (
        workers,
        f"{answer.accelerators:,}",
        f"{answer.rate:,.4g}",
        *(_time(seconds) for seconds in (*answer.ttft_s, *answer.tpot_s)),
        f"{answer.dollars_per_million:,.3g}",
        f"{answer.joules_per_token:,.3g}",
    )


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"

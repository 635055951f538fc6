"""``phalanx simulate start``: how long a run of so many nodes takes from its launch to its first step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import click

from phalanx.command.options import AsJson, Option, command_options
from phalanx.plan.whole_run.start import MEASURED, Start, read_s, start
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, ValueRange

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


@click.command("start")
@command_options(SimulateStartOptions)
def command(options: SimulateStartOptions) -> None:
    """The time from the launch to the first step, phase by phase: a closed form with measured costs of one node or rank.

    Agents attach while their workers import; the shorter of the two is hidden, and marked so. The wait for a scheduler's nodes is not counted, nor
    is a scheduler's own start of so many tasks.

    \b
      phalanx simulate start
      phalanx simulate start --nodes 12500 --files shared --checkpoint-gb 5700
      phalanx simulate start --nodes 500 --by-ssh --json
    """
    from dataclasses import replace

    costs = MEASURED
    if options.file_calls_per_s is not None:
        given = replace(costs.file_calls_per_s, value=options.file_calls_per_s, source="--file-calls-per-s")
        costs = replace(costs, file_calls_per_s=given)
    found = [
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
    click.echo(json.dumps([_as_json(one) for one in found]) if options.as_json else "\n".join(_table(found)))


def _as_json(one: Start) -> dict[str, object]:
    phases = [
        {
            "phase": phase.name,
            "s": phase.duration_s,
            "source": phase.source,
            "hidden": phase.name == one.hidden,
        }
        for phase in one.phases
    ]
    return {"nodes": one.nodes, "total_s": one.total_s, "phases": phases}


def _table(found: list[Start]) -> list[str]:
    lines = [f"{'seconds, nodes:':<18}" + "".join(f"{one.nodes:>12,}" for one in found)]
    for place, phase in enumerate(found[0].phases):
        cells = (
            f"({one.phases[place].duration_s:,.1f})"
            if phase.name == one.hidden
            else f"{one.phases[place].duration_s:,.1f}"
            for one in found
        )
        lines.append(f"{phase.name:<18}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append(f"{'in all':<18}" + "".join(f"{one.total_s:>12,.1f}" for one in found))
    return [*lines, "(in brackets: hidden by what goes on at the same time)"]

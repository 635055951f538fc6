"""``phalanx simulate start``: how long a run of so many nodes takes from its launch to its first step."""

from __future__ import annotations

import json

import click

from phalanx.plan.whole_run.start import MEASURED, Files, Start, read_s, start

_NODES = (1, 100, 1_000, 10_000, 25_000)


@click.command("start")
@click.option(
    "--nodes", multiple=True, type=click.IntRange(1), help="May be repeated; by default 1 to 25,000."
)
@click.option("--workers", default=8, show_default=True, type=click.IntRange(1), help="Of each node.")
@click.option(
    "--files",
    default="local",
    show_default=True,
    type=click.Choice(["local", "shared"]),
    help="Where Python and its packages lie: on every node, or on one file system for all.",
)
@click.option(
    "--file-calls-per-s",
    type=click.FloatRange(0, min_open=True),
    help=f"Of the shared file system, for all nodes; by default {MEASURED.file_calls_per_s.value:,.0f}.",
)
@click.option("--by-ssh", is_flag=True, help="The launcher logs into every node: phalanx submit --on ssh.")
@click.option(
    "--checkpoint-gb",
    default=0.0,
    type=click.FloatRange(0),
    help="Size of the checkpoint that is read; 0 for none.",
)
@click.option(
    "--storage-gb-per-s",
    default=2_000.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Rate of its storage, for all nodes (Llama 3: 2 TB/s sustained).",
)
@click.option(
    "--node-gb-per-s",
    default=50.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Rate at which one node reads.",
)
@click.option(
    "--warmup-s",
    default=0.0,
    type=click.FloatRange(0),
    help="Compilation, and what the first step takes longer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    nodes: tuple[int, ...],
    workers: int,
    files: str,
    file_calls_per_s: float | None,
    by_ssh: bool,
    checkpoint_gb: float,
    storage_gb_per_s: float,
    node_gb_per_s: float,
    warmup_s: float,
    as_json: bool,
) -> None:
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
    if file_calls_per_s is not None:
        given = replace(costs.file_calls_per_s, value=file_calls_per_s, source="--file-calls-per-s")
        costs = replace(costs, file_calls_per_s=given)
    where: Files = "shared" if files == "shared" else "local"
    found = [
        start(
            count,
            workers,
            files=where,
            by_ssh=by_ssh,
            restore_s=read_s(checkpoint_gb, count, storage_gb_per_s, node_gb_per_s),
            warmup_s=warmup_s,
            costs=costs,
        )
        for count in nodes or _NODES
    ]
    click.echo(json.dumps([_as_json(one) for one in found]) if as_json else "\n".join(_table(found)))


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

"""``phalanx show``: the size and cost of a run's model, without building it, and the contents of each rank on
a fleet of some size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.cli.errors import explained, refuse_given
from phalanx.cli.output import text_console
from phalanx.command import Argument, AsJson, Option, Overrides, command_options
from phalanx.command_help import Command
from phalanx.model.facts.holdings import Holding, fullest, state_bytes
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count, fleet_state_bytes, stage_layers
from phalanx.observe.throughput import format_bytes, format_count
from phalanx.parallel.collectives import collectives, rounds_per_step
from phalanx.run.fields import POSITIVE, JsonObject, RunFileError
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import Layout, layout_of, layout_problems, micro_batches_per_slot
from phalanx.run.read import compute_format, device_of, read_run, run_file_at
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.train.measure.dry_run import Comparison


# ``phalanx show --ranks``: what each rank of a fleet of that size holds and calls in a step, and the dry run
# of some ranks. Facts first, as plain data that ``--json`` prints; tables are made of them. Only the dry run
# needs torch.


def resolved(spec: RunSpec, ranks: int, path: Path) -> RunSpec:
    """Return the run with model, format and pipeline split filled in, as it would be on GPUs unless its run file
    selects CPUs.

    Raises ``RunFileError`` with the fields that are impossible on ``ranks`` ranks.
    """
    compute = compute_format(spec.precision, device_of(spec.runtime, has_gpu=True))
    spec = dataclasses.replace(
        spec,
        model=resolve(spec.model, spec.data.vocab_size),
        precision=dataclasses.replace(spec.precision, compute=compute),
    )
    problems = layout_problems(spec, ranks)
    if problems:
        raise RunFileError(path, problems)
    if spec.parallel.pipeline == 1:
        return spec
    # Balanced once, not for every inspected rank.
    split = tuple(map(len, stage_layers(spec)))
    return dataclasses.replace(spec, parallel=dataclasses.replace(spec.parallel, pipeline_split=split))


def layout_facts(spec: RunSpec, ranks: int) -> JsonObject:
    """Return the degrees of a run on ``ranks`` ranks, and the contents and calls of the fullest rank at each
    pipeline place.

    Also the number of rounds a step, and the largest state in bytes.
    """
    layout = layout_of(spec.parallel, ranks)
    stages = [_stage_facts(spec, layout, fullest(spec, layout, rank)) for rank in range(layout.pipeline)]
    return {
        "ranks": ranks,
        "mesh": {**layout.degrees, "expert": layout.expert, "expert_tensor": layout.expert_tensor},
        "team": layout.team,
        "expert_shard": layout.expert_shard if spec.model.moe else None,
        "rounds_per_step": rounds_per_step(spec, layout),
        "micro_batches_per_slot": micro_batches_per_slot(spec),
        "pipeline_ranks": stages,
        "state_bytes_most": max(stage["state_bytes_total"] for stage in stages),
    }


def _stage_facts(spec: RunSpec, layout: Layout, holding: Holding) -> JsonObject:
    """Return layers, parameters, bytes of state, and collectives a step (by axis and kind), of one rank's place in
    the pipeline.
    """
    state = state_bytes(spec, layout, holding, 2 if spec.precision.compute == "bf16" else 4)
    calls: dict[str, dict[str, int]] = {}
    for (axis, kind), number in sorted(collectives(spec, layout, holding).items()):
        calls.setdefault(axis, {})[kind] = number
    return {
        "pipeline_rank": holding.place.pipeline,
        "stages": holding.stages,
        "layers": holding.layers,
        "embedding": holding.embedding,
        "head": holding.head,
        "dense_parameters": holding.dense,
        "expert_parameters": holding.experts,
        "state_bytes": state,
        "state_bytes_total": sum(state.values()),
        "collectives_per_step": calls,
    }


def default_ranks(spec: RunSpec, ranks: int) -> list[int]:
    """Return one rank of the first, of the middle and of the last pipeline stage, each at another place in its
    stage.

    Fewer if they coincide.
    """
    pipeline = spec.parallel.pipeline
    per_stage = ranks // pipeline
    places = ((0, 0), (pipeline // 2, per_stage // 2), (pipeline - 1, per_stage - 1))
    return list(dict.fromkeys(stage * per_stage + inside for stage, inside in places))


def dry_run_facts(
    spec: RunSpec, ranks: int, chosen: Sequence[int], on_rank: Callable[[int], None]
) -> list[JsonObject]:
    """Return for each chosen rank the dry run's comparison of derived with built parameters and collectives.

    ``on_rank`` is called with the rank before each. Raises ``LayoutError`` if the run does not allow ``ranks``.
    """
    from phalanx.train.measure.dry_run import dry_run

    facts = []
    for rank in chosen:
        on_rank(rank)
        facts.append(_comparison_facts(dry_run(spec, ranks, rank)))
    return facts


def _comparison_facts(comparison: Comparison) -> JsonObject:
    """Return a comparison as JSON: sums of elements, the parameters that differ and all collectives with both
    numbers, and if all match.
    """
    differing = {
        name: {"derived": derived, "built": built}
        for name, (derived, built) in comparison.elements.items()
        if derived != built
    }
    return {
        "rank": comparison.rank,
        "stages": comparison.stages,
        "parameters": len(comparison.elements),
        "elements": {
            "derived": sum(pair[0] for pair in comparison.elements.values()),
            "built": sum(pair[1] for pair in comparison.elements.values()),
        },
        "parameters_differing": differing,
        "collectives": [
            {"axis": axis, "kind": kind, "derived": derived, "counted": counted}
            for (axis, kind), (derived, counted) in comparison.calls.items()
        ],
        "matches": comparison.matches,
    }


def print_layout(facts: JsonObject) -> None:
    """Print the tables of ``layout_facts``."""
    from rich.table import Table
    from rich.text import Text

    from phalanx.observe.logs.read_lines import ranges

    console = text_console()
    mesh = (
        " x ".join(f"{axis} {degree}" for axis, degree in facts["mesh"].items() if degree > 1) or "one rank"
    )
    console.print(Text.assemble((f"\n{facts['ranks']:,} ranks", "bold"), f": {mesh}"))
    teams = f"teams of {facts['team']} share experts; " if facts["team"] > 1 else ""
    console.print(
        f"{teams}a rank computes {facts['rounds_per_step']} slots of {facts['micro_batches_per_slot']} "
        "micro-batches in a step\n",
        style="dim",
    )
    groups = _alike(facts["pipeline_ranks"])
    table = Table("place in the pipeline", *(ranges(places, most=len(places)) for _, places in groups))
    for column in table.columns[1:]:
        column.justify = "right"
    stages = [stage for stage, _ in groups]
    table.add_row("layers", *(str(len(stage["layers"])) for stage in stages))
    table.add_row("besides", *(", ".join(e for e in ("embedding", "head") if stage[e]) for stage in stages))
    for title in ("dense_parameters", "expert_parameters"):
        table.add_row(title.replace("_", " "), *(format_count(stage[title]) for stage in stages))
    for kind in dict.fromkeys(kind for stage in stages for kind in stage["state_bytes"]):
        table.add_row(kind, *(format_bytes(stage["state_bytes"].get(kind, 0)) for stage in stages))
    total = (format_bytes(stage["state_bytes_total"]) for stage in stages)
    table.add_row("state of the fullest rank", *total, style="bold", end_section=True)
    _add_calls(table, stages)
    console.print(table)


def _add_calls(table: Table, stages: list[JsonObject]) -> None:
    """Add a row for each kind of collective to ``table``, with its number a step in each stage's column."""
    calls = [
        {
            (axis, kind): n
            for axis, kinds in stage["collectives_per_step"].items()
            for kind, n in kinds.items()
        }
        for stage in stages
    ]
    for axis, kind in sorted({key for each in calls for key in each}):
        counts = (f"{each.get((axis, kind), 0):,}" for each in calls)
        table.add_row(f"{axis} {kind.replace('_', '-')} a step", *counts)


def _alike(stages: list[JsonObject]) -> list[tuple[JsonObject, list[int]]]:
    """Group the places of the pipeline with equal contents and calls: (the first one's facts, the places), in order."""
    groups: dict[str, tuple[JsonObject, list[int]]] = {}
    for stage in stages:
        contents = {key: stage[key] for key in stage if key not in ("pipeline_rank", "stages", "layers")}
        groups.setdefault(f"{len(stage['layers'])} {contents}", (stage, []))[1].append(stage["pipeline_rank"])
    return list(groups.values())


def print_dry_run(facts: JsonObject) -> None:
    """Print the table of one rank of ``dry_run_facts``."""
    from rich.table import Table
    from rich.text import Text

    verdict = ("matches", "green") if facts["matches"] else ("differs", "red")
    title = Text.assemble(f"Rank {facts['rank']:,}: ", verdict)
    table = Table("what", "", "derived", "found", title=title, highlight=False)
    for column in table.columns[2:]:
        column.justify = "right"
    elements = facts["elements"]
    table.add_row(
        "elements held",
        f"{facts['parameters']} parameters",
        f"{elements['derived']:,}",
        f"{elements['built']:,}",
    )
    for name, pair in list(facts["parameters_differing"].items())[:10]:
        table.add_row("", name, f"{pair['derived']:,}", f"{pair['built']:,}", style="red")
    for row in facts["collectives"]:
        style = None if row["derived"] == row["counted"] else "red"
        table.add_row(row["axis"], row["kind"], f"{row['derived']:,}", f"{row['counted']:,}", style=style)
    text_console().print(table)


_COMPUTE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    run_file: Annotated[Path, Argument()]
    overrides: Overrides = ()
    """Override a field; may be repeated."""
    ranks: Annotated[int | None, POSITIVE] = None
    """Show what each rank of a fleet of this size holds and calls."""
    dry: Annotated[bool, Option("--dry-run")] = False
    """Build and step single ranks of that fleet, and compare; exit code 1 if anything differs."""
    chosen: Annotated[tuple[int, ...], Option("--rank")] = ()
    """A rank to dry-run; may be repeated. By default three."""
    as_json: AsJson = False


@click.command("show", cls=Command)
@command_options(ShowOptions)
def command(options: ShowOptions) -> None:
    """Show parameters, FLOPs per token and state bytes of a run. Needs no GPU and builds nothing.

    With --ranks also the contents of each rank on a fleet of that size, which need not exist. A dry run
    builds the trainer's own modules of a few of its ranks without memory, and counts the collectives of a
    step of a tiny model on the same layout. Exit code 1 if they differ from the derived numbers.

    \b
      phalanx show configs/llama3-405b.toml
      phalanx show configs/quickstart.toml --set model.layers=8 --json
      phalanx show configs/deepseek-v3.toml --ranks 2048
      phalanx show configs/moe-100t.toml --ranks 98304 --dry-run
    """
    if not options.dry:
        refuse_given(("chosen",), "is for --dry-run")
    if options.dry and options.ranks is None:
        raise click.UsageError("a dry run needs the size of the fleet: give --ranks")
    if any(not 0 <= rank < (options.ranks or 0) for rank in options.chosen):
        raise click.UsageError(f"--rank must be from 0 to {(options.ranks or 0) - 1}")
    with explained():
        spec = read_run(run_file_at(options.run_file), PRESETS, options.overrides)
        facts = _facts(spec)
        laid_out = resolved(spec, options.ranks, options.run_file) if options.ranks else None
    if laid_out and options.ranks:
        facts["layout"] = layout_facts(laid_out, options.ranks)
    if not options.as_json:
        _print(facts)
        if "layout" in facts:
            print_layout(facts["layout"])
    if laid_out and options.ranks and options.dry:
        facts["dry_run"] = _dry_run(laid_out, options.ranks, options.chosen, as_json=options.as_json)
    if options.as_json:
        click.echo(json.dumps(facts))
    if not all(rank_facts["matches"] for rank_facts in facts.get("dry_run", ())):
        raise SystemExit(1)


def _dry_run(spec: RunSpec, ranks: int, chosen: tuple[int, ...], *, as_json: bool) -> list[JsonObject]:
    """Return the comparison by the dry run of each chosen rank, or of the default ones if none is.

    Printed as tables unless ``as_json``; progress goes to standard error.
    """

    def tell(rank: int) -> None:
        click.echo(f"building and stepping rank {rank:,} of {ranks:,}", err=True)

    if not as_json:
        click.echo(
            "\nDry run: collectives of a tiny model, one slot of as few micro-batches as the schedule allows"
        )
    facts = dry_run_facts(spec, ranks, chosen or default_ranks(spec, ranks), tell)
    if not as_json:
        for rank in facts:
            print_dry_run(rank)
    return facts


def _facts(spec: RunSpec) -> JsonObject:
    """Return shape, parameters, FLOP and bytes of state of a run's model over the whole fleet, as JSON."""
    model = resolve(spec.model, spec.data.vocab_size)
    counts = count(model, spec.train.seq_len)
    tokens = spec.train.batch_size * spec.train.seq_len
    compute = compute_format(spec.precision, device_of(spec.runtime, has_gpu=True))
    state = fleet_state_bytes(model, spec.optimizer, _COMPUTE_BYTES[compute])
    return {
        "model": {k: v for k, v in dataclasses.asdict(model).items() if v not in (None, "", False)},
        "parameters": counts.parameters,
        "embedding_parameters": counts.embedding_parameters,
        "matmul_parameters": counts.matmul_parameters,
        "seq_len": spec.train.seq_len,
        "flops_per_token": counts.flops_per_token,
        "flops_per_token_causal": counts.flops_per_token_causal,
        "tokens_per_step": tokens,
        "steps": spec.train.steps,
        "flops_of_run": counts.flops_per_token * tokens * spec.train.steps,
        "state_bytes": state,
        "state_bytes_total": sum(state.values()),
    }


def _print(facts: JsonObject) -> None:
    """Print the table of a run's model: shape, parameters, FLOP and state."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    model = facts["model"]
    shape = f"{model['layers']} layers x {model['dim']:,}"
    heads = f"{model['heads']} heads of {model['head_dim']}, {model['kv_heads']} key/value"
    table.add_row(
        "shape", shape, f"{heads}; {model['ffn']} {model['ffn_dim']:,}; vocabulary {model['vocab_size']:,}"
    )
    table.add_row("parameters", format_count(facts["parameters"]), f"{facts['parameters']:,}")
    table.add_row(
        "FLOP per token",
        format_count(facts["flops_per_token"]),
        f"at {facts['seq_len']:,} tokens of context, attention counted in full (PaLM's convention, used for MFU)",
    )
    table.add_row("", format_count(facts["flops_per_token_causal"]), "with the causal half of attention only")
    table.add_row(
        "run",
        f"{facts['flops_of_run']:.2e} FLOP",
        f"{facts['steps']:,} steps of {facts['tokens_per_step']:,} tokens",
    )
    for kind, size in facts["state_bytes"].items():
        table.add_row(kind, format_bytes(size), "")
    total = format_bytes(facts["state_bytes_total"])
    table.add_row("state", total, "over the whole fleet, without activations", style="bold")
    text_console().print(table)

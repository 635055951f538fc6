"""``phalanx show``: what a run's model is and weighs, without building it; and who holds what on a fleet of some size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained
from phalanx.cli.plan.show_ranks import (
    default_ranks,
    dry_run_facts,
    layout_facts,
    print_dry_run,
    print_layout,
    resolved,
)
from phalanx.cli.text_console import text_console
from phalanx.model.facts.counts import count, fleet_state_bytes
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.throughput import format_bytes, format_count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import read_run
from phalanx.run.resolve import compute_format, device_of
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from phalanx.run.section_reader import JsonObject

_COMPUTE_BYTES = {"bf16": 2, "fp32": 4}


@click.command("show")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field; may be repeated."
)
@click.option(
    "--ranks", type=click.IntRange(min=1), help="Show what each rank of a fleet of this size holds and calls."
)
@click.option(
    "--dry-run",
    "dry",
    is_flag=True,
    help="Build and step single ranks of that fleet, and compare; exit code 1 if anything differs.",
)
@click.option(
    "--rank", "chosen", type=int, multiple=True, help="A rank to dry-run; may be repeated. By default three."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run_file: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    dry: bool,
    chosen: tuple[int, ...],
    as_json: bool,
) -> None:
    """Show parameters, FLOPs per token and state bytes of a run. Needs no GPU and builds nothing.

    With --ranks also who holds what on a fleet of that size, of which nothing need exist. A dry run builds the trainer's own
    modules of a few of its ranks without memory, and counts the collectives of a step of a tiny model on the same layout.

    \b
      phalanx show configs/llama3-405b.toml
      phalanx show configs/quickstart.toml --set model.layers=8 --json
      phalanx show configs/deepseek-v3.toml --ranks 2048
      phalanx show configs/moe-100t.toml --ranks 98304 --dry-run
    """
    if (dry or chosen) and ranks is None:
        raise click.UsageError("a dry run needs the size of the fleet: give --ranks")
    if any(not 0 <= rank < (ranks or 0) for rank in chosen):
        raise click.UsageError(f"--rank must be from 0 to {(ranks or 0) - 1}")
    with explained():
        spec = read_run(run_file, PRESETS, overrides)
        facts = _facts(spec)
        laid_out = resolved(spec, ranks, run_file) if ranks else None
    if laid_out and ranks:
        facts["layout"] = layout_facts(laid_out, ranks)
    if not as_json:
        _print(facts)
        if "layout" in facts:
            print_layout(facts["layout"])
    if laid_out and ranks and dry:
        facts["dry_run"] = _dry_run(laid_out, ranks, chosen, as_json=as_json)
    if as_json:
        click.echo(json.dumps(facts))
    if not all(found["matches"] for found in facts.get("dry_run", ())):
        raise SystemExit(1)


def _dry_run(spec: RunSpec, ranks: int, chosen: tuple[int, ...], *, as_json: bool) -> list[JsonObject]:
    def tell(rank: int) -> None:
        click.echo(f"building and stepping rank {rank:,} of {ranks:,}", err=True)

    if not as_json:
        click.echo(
            "\nDry run: collectives of a tiny model, one slot of as few micro-batches as the schedule allows"
        )
    found = dry_run_facts(spec, ranks, chosen or default_ranks(spec, ranks), tell)
    if not as_json:
        for rank in found:
            print_dry_run(rank)
    return found


def _facts(spec: RunSpec) -> JsonObject:
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

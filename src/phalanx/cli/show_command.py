"""``phalanx show``: what a run's model is and weighs, without building it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from phalanx.cli.errors import explained
from phalanx.model.counts import count
from phalanx.model.presets import PRESETS
from phalanx.model.shape import resolve
from phalanx.observe.throughput import format_bytes, format_count
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec

_COMPUTE_BYTES = {"auto": 2, "bf16": 2, "fp32": 4}


@click.command("show")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show parameters, FLOPs per token and state bytes of a run. Needs no GPU and builds nothing.

    \b
      phalanx show configs/llama3-405b.toml
      phalanx show configs/quickstart.toml --set model.layers=8 --json
    """
    with explained():
        spec = read_run(run_file, PRESETS, overrides)
    facts = _facts(spec)
    if as_json:
        click.echo(json.dumps(facts))
        return
    _print(facts)


def _facts(spec: RunSpec) -> dict[str, Any]:
    model = resolve(spec.model, spec.data.vocab_size)
    counts = count(model, spec.train.seq_len)
    tokens = spec.train.batch_size * spec.train.seq_len
    state = counts.state_bytes(_COMPUTE_BYTES[spec.precision.compute])
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


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
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
    Console(highlight=False).print(table)

"""``phalanx models``: the known model shapes, with their sizes and sources."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from phalanx.cli.output import text_console
from phalanx.command_help import Command
from phalanx.model.facts import presets
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import DataSpec, ModelSpec

if TYPE_CHECKING:
    from phalanx.run.fields import JsonObject

_SEQ_LEN = 4096
_VOCAB = DataSpec().vocab_size
"""The vocabulary of presets that take it from the data: the data's default."""


@click.command("models", cls=Command)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, as_json: bool) -> None:
    """List the models that a run file or a plan can name, or every dimension of the one called NAME.

    \b
      phalanx models
      phalanx models llama3-405b
      phalanx models --json
    """
    if name is not None and name not in PRESETS:
        raise click.ClickException(f"there is no model {name!r}: there are {', '.join(PRESETS)}")
    models = {key: _facts(spec) for key, spec in PRESETS.items() if name in (None, key)}
    if as_json:
        click.echo(json.dumps({"models": models, "sources": presets.__doc__}))
    elif name is not None:
        _print_one(name, models[name])
    else:
        _print_all(models)


def _facts(spec: ModelSpec) -> JsonObject:
    """Return a model's counts and shape for JSON."""
    model = resolve(spec, _VOCAB)
    counts = count(model, _SEQ_LEN)
    return {
        "parameters": counts.parameters,
        "active_parameters": counts.active_parameters,
        "flops_per_token": counts.flops_per_token,
        "seq_len": _SEQ_LEN,
        "shape": {
            key: value for key, value in dataclasses.asdict(model).items() if value not in (None, "", False)
        },
    }


def _print_all(models: dict[str, JsonObject]) -> None:
    """Print a table of the known models, and the conventions of counting."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("name", "parameters", "active", "layers", "dim", "heads", "KV heads", "experts"):
        is_name = column == "name"  # users copy it
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for key, facts in models.items():
        shape = facts["shape"]
        sizes = (f"{facts[part] / 1e9:,.4g} B" for part in ("parameters", "active_parameters"))
        table.add_row(
            key,
            *sizes,
            *(f"{shape[part]:,}" for part in ("layers", "dim", "heads", "kv_heads")),
            f"{shape['moe']['experts']:,}" if "moe" in shape else "-",
        )
    console = text_console(highlight=True)
    console.print(table)
    console.print(presets.__doc__, highlight=False)


def _print_one(name: str, facts: JsonObject) -> None:
    """Print the counts and the shape of one model."""
    table = Table.grid(padding=(0, 2))
    for key in ("parameters", "active_parameters", "flops_per_token"):
        table.add_row(key, f"{facts[key]:,}")
    for key, value in facts["shape"].items():
        table.add_row(key, f"{value:,}" if type(value) is int else str(value))
    console = text_console(highlight=True)
    head = Text.assemble((name, "bold"), f" (FLOPs per token at {facts['seq_len']:,} tokens)")
    console.print(head, highlight=False)
    console.print(table)

"""``phalanx hardware`` and ``phalanx models``: the accelerators, systems and models that plans know, and the sources of each figure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from phalanx.cli.errors import explained
from phalanx.cli.output import text_console
from phalanx.command_help import Command
from phalanx.hardware.catalog import accelerator, accelerators, systems
from phalanx.hardware.cluster import Accelerator, Fact, HardwareError, System
from phalanx.hardware.profile import Provenance, profile_of
from phalanx.model.facts import presets
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import DataSpec, ModelSpec

if TYPE_CHECKING:
    from phalanx.run.fields import JsonObject


@click.command("hardware", cls=Command)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hardware_command(name: str | None, as_json: bool) -> None:
    """List accelerators and systems, or every figure of the one called NAME, with its source and date.

    Peaks are dense. What is marked "recalled" was written down from memory of the named document.

    \b
      phalanx hardware
      phalanx hardware h100
      phalanx hardware gb200-nvl72 --json
    """
    with explained(HardwareError):
        if name is None:
            _list(as_json)
        else:
            _show(name, as_json)


def _list(as_json: bool) -> None:
    """Print all accelerators and systems, as tables or JSON."""
    if as_json:
        entries = {key: _plain(entry) for key, entry in accelerators().items()}
        click.echo(
            json.dumps({"accelerators": entries, "systems": {k: _plain(s) for k, s in systems().items()}})
        )
        return
    console = text_console(highlight=True)
    table = Table(
        title="Accelerators (dense peaks; phalanx hardware NAME shows the sources)", title_justify="left"
    )
    for column in ("key", "name", "bf16 TFLOP/s", "fp8", "fp4", "memory GiB", "TB/s", "W", "$/h"):
        table.add_column(column, justify="left" if column in ("key", "name") else "right")
    for entry in accelerators().values():
        table.add_row(*_summary(entry))
    console.print(table)
    table = Table(title="Systems (NAME:ACCELERATORS or NAME x DOMAINS makes a cluster)", title_justify="left")
    for column in ("key", "accelerator", "domain", "GB/s inside", "GB/s outside", "fabric"):
        table.add_column(column, justify="left" if column in ("key", "accelerator", "fabric") else "right")
    for system in systems().values():
        inside, outside = system.domain.bytes_per_s.value / 1e9, system.fabric.bytes_per_s.value / 1e9
        rates = f"{inside:,.0f}", f"{outside:,.1f}"
        table.add_row(system.key, system.accelerator.key, str(system.domain.size), *rates, system.fabric.kind)
    console.print(table)


def _summary(entry: Accelerator) -> tuple[str, ...]:
    """Return an accelerator's row of the table: key, name, TFLOP/s in bf16 (else fp16), fp8 and fp4, GiB, TB/s, watts
    and dollars an hour.

    A format that it lacks is ``-``.
    """
    sixteen = entry.flops.get("bf16", entry.flops.get("fp16"))
    return (
        entry.key,
        entry.name + (" (announced)" if entry.announced_only else ""),
        *(
            f"{fact.value / 1e12:,.5g}" if fact else "-"
            for fact in (sixteen, *map(entry.flops.get, ("fp8", "fp4")))
        ),
        f"{entry.memory_bytes.value / 2**30:,.1f}",
        f"{entry.memory_bytes_per_s.value / 1e12:,.3g}",
        f"{entry.power_w.value:,.0f}",
        f"{entry.price_per_hour.value:.2f}",
    )


def _show(name: str, as_json: bool) -> None:
    """Print the figures of an accelerator or system with their sources, and the fitted constants. JSON if
    ``as_json``.

    A system is printed with its accelerator. Raises ``HardwareError`` for a name of neither.
    """
    system = systems().get(name)
    chip = accelerators().get(name) or (system.accelerator if system else accelerator(name))
    fits = dict(_fits(chip))
    if as_json:
        shown = {"accelerator": _plain(chip), "system": _plain(system) if system else None}
        click.echo(json.dumps({**shown, "fitted": {key: _plain(fit) for key, fit in fits.items()}}))
        return
    console = text_console(soft_wrap=True, highlight=True)
    for title, entry in ((chip.name, chip), (f"System {name}", system)):
        if entry is None:
            continue
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(_figures(entry))
    console.print(
        Text.assemble(("\nFitted constants", "bold"), f" (profile {profile_of(chip).constants.name})"),
        highlight=False,
    )
    console.print(_fit_table(fits))


def _figures(entry: Accelerator | System) -> Table:
    """Return a table of an entry's figures: name, value, source and date."""
    table = Table.grid(padding=(0, 2))
    for name, value in _leaves(entry, ""):
        fact = value if isinstance(value, Fact) else Fact(value, "")
        shown = f"{fact.value:,.6g}" if type(fact.value) in (int, float) else str(fact.value)
        source = fact.source + (f", {fact.date}" if fact.date else "")
        table.add_row(name, shown, Text(source, style="dim"))
    return table


def _leaves(entry: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all figures in ``entry``; each of a fabric's ``levels`` as one text.

    A system's accelerator, other tuples and empty strings are left out.
    """
    for field in dataclasses.fields(entry):
        value, name = getattr(entry, field.name), prefix + field.name
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", fact) for key, fact in value.items())
        elif field.name == "levels":
            for level in value:
                yield (
                    f"{name}.{level.name}",
                    f"to {level.reach:,}, share {level.share:.3g}, {level.latency_s * 1e6:.3g} us",
                )
        elif dataclasses.is_dataclass(value) and not isinstance(value, (Fact, Accelerator)):
            yield from _leaves(value, f"{name}.")
        elif not isinstance(value, (Accelerator, tuple)) and value != "":
            yield name, value


def _fits(chip: Accelerator) -> Iterator[tuple[str, Any]]:
    """Yield (name, fit) of all fitted constants of an accelerator."""
    constants = profile_of(chip).constants
    yield from ((f"matmul {key}", fit) for key, fit in constants.matmul.items())
    yield from (
        ("attention", constants.attention),
        ("memory-bound", constants.memory),
        ("network", constants.network),
    )
    yield from constants.collectives.items()


def _fit_table(fits: dict[str, Any]) -> Table:
    """Return a table of fits: name, constants and origin."""
    table = Table.grid(padding=(0, 2))
    for name, fit in fits.items():
        values = [
            f"{field.name} {getattr(fit, field.name):.3g}"
            for field in dataclasses.fields(fit)
            if field.name != "provenance"
        ]
        table.add_row(name, ", ".join(values), Text(_origin(fit.provenance), style="dim"))
    return table


def _origin(provenance: Provenance) -> str:
    """Describe where a fit is from: source, versions and date; with points also their number and median error."""
    measured = f"; {provenance.points:,} points, {provenance.median_error:.1%} median error on unseen ones"
    versions = f" {provenance.versions}" if provenance.versions else ""
    return f"{provenance.source}{versions}, {provenance.date}{measured if provenance.points else ''}"


def _plain(entry: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dataclasses.asdict(entry)
    return plain


_SEQ_LEN = 4096
_VOCAB = DataSpec().vocab_size
"""The vocabulary of presets that take it from the data: the data's default."""


@click.command("models", cls=Command)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models_command(name: str | None, as_json: bool) -> None:
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
    """Return a model's counts and FLOPs per token at ``_SEQ_LEN`` tokens, and the fields of its shape that are set, for JSON."""
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

"""``phalanx new``: writes a first run file, with the meaning of every field beside it."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.command_help import Command
from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import RunFileError
from phalanx.run.read import first_run_file, read_table, shipped_names


@click.command("new", cls=Command)
@click.argument("name")
@click.option(
    "--from",
    "source",
    type=click.Choice(shipped_names()),
    default="quickstart",
    show_default=True,
    help="The run file to begin with.",
)
def command(name: str, source: str) -> None:
    """Write NAME.toml, a run file to begin with: a copy of one that comes with Phalanx, each field explained.

    \b
      phalanx new first
      phalanx new mixture --from quickstart-moe
      phalanx train first.toml
    """
    name = name.removesuffix(".toml")
    target = Path(f"{name}.toml")
    with explained(RunFileError):
        text = first_run_file(source, name)
        read_table({}, PRESETS, [f'name="{name}"'], target)  # A name that no run can have.
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.ClickException(f"{target} is there already; give another name, or remove it") from None
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    click.echo(f"{target}: written from {source}")
    click.echo(f"  all fields: phalanx spec; the resulting model: phalanx show {target}")
    click.echo(f"  to train it: phalanx train {target}")

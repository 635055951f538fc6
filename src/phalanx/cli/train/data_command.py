"""``phalanx data``: token shards made from text, and checked."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.train.data_order import mixture_command, order_command, where_command
from phalanx.cli.train.data_origin import show_command, trace_command
from phalanx.cli.train.data_prepare import prepare_command
from phalanx.cli.train.data_recipe import plan_command, work_command
from phalanx.data.errors import DataError


@click.group("data")
def command() -> None:
    """Prepare and check token shards, and see what a run reads of them and when."""


command.add_command(prepare_command)
command.add_command(mixture_command)
command.add_command(order_command)
command.add_command(where_command)
command.add_command(plan_command)
command.add_command(work_command)
command.add_command(show_command)
command.add_command(trace_command)


@command.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--write-sums",
    is_flag=True,
    help="Write the block sums of intact shards that have none, so that training checks what it reads.",
)
def verify_command(folder: Path, write_sums: bool) -> None:
    """Read the tokenizer and every token shard in FOLDER and compare them with their checksums.

    \b
      phalanx data verify data/books
      phalanx data verify data/books --write-sums     # prepared by 0.1.0, which wrote none
    """
    from phalanx.data.dataset import verify_dataset

    with explained(DataError):
        without = verify_dataset(folder, write_missing_sums=write_sums)
    click.echo("the tokenizer and every shard are as they were written")
    if without:
        shards = "1 shard has" if without == 1 else f"{without:,} shards have"
        click.echo(f"{shards} no block sums, which training checks each read by: --write-sums writes them")

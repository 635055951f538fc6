"""``phalanx data``: token shards made from text, copied and checked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click

from phalanx.cli.data.order import mixture_command, order_command, where_command
from phalanx.cli.data.origin import show_command, trace_command
from phalanx.cli.data.prepare import prepare_command
from phalanx.cli.data.recipe import plan_command, work_command
from phalanx.cli.errors import explained
from phalanx.data.errors import DataError
from phalanx.observe.throughput import format_bytes
from phalanx.store.open_store import is_remote

# ``phalanx data copy`` and ``phalanx data verify``: prepared datasets in folders and object stores.

_PAUSE_S = 1.0


@click.command("copy", short_help="Copy a dataset to another folder or object store.")
@click.argument("source")
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def copy_command(source: str, target: str, as_json: bool) -> None:
    """Copy the prepared dataset at SOURCE to TARGET: folders, s3://, gs:// or az://.

    All of it is compared with its checksums on the way. It can be used at TARGET once it is there as a whole; an interrupted copy goes on.

    \b
      phalanx data copy data/books s3://corpora/books
      phalanx data copy s3://corpora/books data/books
    """
    from phalanx.data.stored.copies import copy_dataset

    with explained(DataError):
        copied = copy_dataset(source, target, _nothing if as_json else _told("copied"))
    facts = {
        "path": target,
        "was_there": copied.was_there,
        "fingerprint": copied.index.fingerprint,
        "written_bytes": copied.written_bytes,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo(
            f"{target}: {'was there already' if copied.was_there else 'copied'}; fingerprint {copied.index.fingerprint[:16]}"
        )


@click.command("verify", short_help="Read a dataset whole and compare it with its checksums.")
@click.argument("place", metavar="FOLDER|URL")
@click.option(
    "--write-sums",
    is_flag=True,
    help="Write the block sums of intact shards in a folder that have none, so that training checks what it reads.",
)
def verify_command(place: str, write_sums: bool) -> None:
    """Read the tokenizer and every token shard in FOLDER, or at URL, and compare them with their checksums.

    \b
      phalanx data verify data/books
      phalanx data verify s3://corpora/books
      phalanx data verify data/books --write-sums     # prepared by 0.1.0, which wrote none
    """
    if is_remote(place):
        if write_sums:
            raise click.UsageError(
                "--write-sums is for folders: write them where the dataset was prepared, and copy it again"
            )
        from phalanx.data.stored.copies import verify_stored

        with explained(DataError):
            verify_stored(place, _told("read"))
        without = 0
    else:
        from phalanx.data.reading.dataset import verify_dataset

        with explained(DataError):
            without = verify_dataset(Path(place), write_missing_sums=write_sums)
    click.echo("the tokenizer and every shard are as they were written")
    if without:
        shards = "1 shard has" if without == 1 else f"{without:,} shards have"
        click.echo(f"{shards} no block sums, which training checks each read by: --write-sums writes them")


def _nothing(_done: int, _of: int) -> None:
    pass


def _told(what: str) -> Callable[[int, int], None]:
    """Says on standard error how far it is, once a second."""
    begin = last = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _PAUSE_S and done < of:
            return
        last = now
        rate = done / max(now - begin, 1e-9)
        left = f", {(of - done) / rate:,.0f} s left" if 0 < done < of else ""
        click.echo(
            f"{what}: {format_bytes(done)} of {format_bytes(of)}, {format_bytes(rate)}/s{left}", err=True
        )

    return tell


@click.group("data")
def command() -> None:
    """Prepare and check token shards, and see what a run reads of them and when.

    \b
      phalanx data prepare texts/*.txt --out data/mine --tokenizer bytes
      phalanx data show data/mine
      phalanx data verify data/mine
      phalanx data show runs/quickstart-1f3a9c04 --step 12    # what a run was trained on in a step
    """


command.add_command(copy_command)
command.add_command(verify_command)
command.add_command(prepare_command)
command.add_command(mixture_command)
command.add_command(order_command)
command.add_command(where_command)
command.add_command(plan_command)
command.add_command(work_command)
command.add_command(show_command)
command.add_command(trace_command)

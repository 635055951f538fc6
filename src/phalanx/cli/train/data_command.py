"""``phalanx data``: token shards made from text, and checked."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.train.data_order import mixture_command, order_command, where_command
from phalanx.data.corpus import BadFile, TextFiles, without_bad_files
from phalanx.data.errors import DataError


@click.group("data")
def command() -> None:
    """Prepare and check token shards, and see what a run reads of them and when."""


command.add_command(mixture_command)
command.add_command(order_command)
command.add_command(where_command)


@command.command("prepare")
@click.argument("text", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--tokenizer", default="bpe", show_default=True, help='"bpe", "bytes", or a tokenizer.json.')
@click.option(
    "--vocab-size",
    type=click.IntRange(min=257),
    default=32_768,
    show_default=True,
    help="Tokens of a trained BPE.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0.0, 0.5, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
)
@click.option("--pack", is_flag=True, help="Put documents whole into records of --seq-len tokens.")
@click.option(
    "--seq-len", type=click.IntRange(min=2), help="With --pack: tokens of a record; the run's train.seq_len."
)
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave out files that are not UTF-8 text, and name them; else they are errors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prepare_command(
    text: tuple[str, ...],
    out: Path,
    tokenizer: str,
    vocab_size: int,
    held_out: float,
    pack: bool,
    seq_len: int | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Turn TEXT (UTF-8 files, folders, globs, or a known corpus) into token shards in --out.

    \b
      phalanx data prepare books/ notes/*.md --out data/books
      phalanx data prepare mail/ --out data/mail --skip-bad
      phalanx data prepare python-stdlib --out data/stdlib --vocab-size 8192
      phalanx data prepare books/ --out data/books-8k --pack --seq-len 8192
    """
    if pack != (seq_len is not None):
        raise click.UsageError("--pack and --seq-len go together")
    from phalanx.data.prepare import prepare
    from phalanx.train.start.prepare import documents_of

    progress = None if as_json else _progress()
    bad: list[BadFile] = []
    with explained(DataError):
        documents = documents_of(text)
        if skip_bad and isinstance(documents, TextFiles):
            check = (lambda _done, _total: None) if progress is None else functools.partial(progress, "check")
            documents, bad = without_bad_files(documents, check)
            for file in bad:
                click.echo(f"left out: {file.path} {file.reason}", err=True)
        info = prepare(
            documents,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size if tokenizer == "bpe" else None,
            held_out_fraction=held_out,
            packed_seq_len=seq_len or 0,
            on_progress=progress,
        )
    facts = {
        "path": str(out),
        "reused": info.reused,
        "vocab_size": info.vocab_size,
        "train_tokens": info.index.train.tokens,
        "held_out_tokens": info.index.held_out.tokens,
        "xz_bits_per_byte": info.held_out_xz_bits_per_byte,
        "fingerprint": info.fingerprint,
        "padding": info.index.train.padding / max(1, info.index.train.tokens),
        "left_out": [str(file.path) for file in bad],
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{out}: {'was there already' if info.reused else 'written'}")
    click.echo(f"  {facts['train_tokens']:,} tokens to train on, {facts['held_out_tokens']:,} held out")
    if pack:
        padding = f"{facts['padding']:.3%} of them padding"
        few = (
            "; documents are too few to fill them better"
            if info.index.train.padding > 0.01 * info.index.train.tokens
            else ""
        )
        click.echo(f"  packed whole into records of {seq_len:,} tokens, {padding}{few}")
    if bad:
        click.echo(f"  left out: {len(bad):,} {'file' if len(bad) == 1 else 'files'}, named above")
    click.echo(f"  vocabulary {info.vocab_size:,}; fingerprint {info.fingerprint[:16]}")


_PAUSE_S = 1.0


def _progress() -> Callable[[str, int, int], None]:
    last = 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last > _PAUSE_S:
            last = now
            click.echo(f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}", err=True)

    return show


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

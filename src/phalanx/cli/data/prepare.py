"""``phalanx data prepare``: token shards made from the user's files, with what was read as what, and what was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from phalanx.cli.data.named import NamedText, prepare_here, prepare_in_portions
from phalanx.cli.data.recipe import PrepareCommand
from phalanx.cli.data.workers import ChosenWorkers, worker_options
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.store.open_store import is_remote


@click.command("prepare", short_help="Turn text into token shards.", cls=PrepareCommand)
@click.argument("text", nargs=-1, required=True)
@click.option(
    "--out", metavar="FOLDER_OR_URL", required=True, help="Where to write: a folder, s3://, gs:// or az://."
)
@click.option(
    "--tokenizer",
    default="bpe",
    show_default=True,
    help='"bpe", "bytes", a tokenizer.json, a tokenizer.model of sentencepiece, or a .tiktoken file.',
)
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
@click.option(
    "--hold-out-by",
    type=click.Choice(["name", "text"]),
    default="name",
    show_default=True,
    help="What decides whether a document is held out: its name, or its text, so that all copies of a text are in one split.",
)
@click.option("--pack", is_flag=True, help="Put documents whole into records of --seq-len tokens.")
@click.option(
    "--seq-len", type=click.IntRange(min=2), help="With --pack: tokens of a record; the run's train.seq_len."
)
@click.option(
    "--layout",
    type=click.Choice(["text", "chat"]),
    default="text",
    show_default=True,
    help="What rows are: texts, or conversations, of which only the assistant's words are learned.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --layout chat: a Jinja template.  [default: that beside the tokenizer]",
)
@click.option(
    "--too-long",
    type=click.Choice(["drop", "cut"]),
    default="drop",
    show_default=True,
    help="With --layout chat: leave out conversations longer than a record, or cut them after an answer.",
)
@click.option(
    "--text-field",
    help='Field of JSON lines, or column of Parquet and Arrow, that holds the text, or the messages.  [default: "text", or "messages"]',
)
@click.option("--as-text", is_flag=True, help="Read JSON lines as the text that they are, with their braces.")
@click.option(
    "--on-bad",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do with files, lines and rows that hold no UTF-8 text: stop at the first, or leave them out and name them.",
)
@click.option("--skip-bad", is_flag=True, hidden=True, help="As --on-bad skip.")
@worker_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prepare_command(
    text: tuple[str, ...],
    out: str,
    tokenizer: str,
    vocab_size: int,
    held_out: float,
    hold_out_by: Literal["name", "text"],
    pack: bool,
    seq_len: int | None,
    layout: Literal["text", "chat"],
    chat_template: Path | None,
    too_long: Literal["drop", "cut"],
    text_field: str | None,
    as_text: bool,
    on_bad: Literal["stop", "skip"],
    skip_bad: bool,
    workers: int | None,
    dask: str | None,
    spark: str | None,
    ray: str | None,
    slurm: bool,
    as_json: bool,
) -> None:
    """Turn TEXT (files, folders, globs, or a known corpus) into token shards in --out.

    Files are UTF-8 text, JSON lines, Parquet or Arrow, as their content says, the first two also compressed by gzip, zstd, xz or
    bzip2; folders may be those that Hugging Face datasets saved.

    With --workers, a cluster, or URLs of object stores, the text is prepared in portions as a recipe's is: by any number of workers, and, whatever ends
    it, the same command goes on.

    \b
      phalanx data prepare books/ notes/*.md --out data/books
      phalanx data prepare mail.jsonl.zst wiki/*.parquet books/ --out data/mixed
      phalanx data prepare dump.jsonl --text-field content --out data/dump --on-bad skip
      phalanx data prepare python-stdlib --out data/stdlib --vocab-size 8192
      phalanx data prepare books/ --out data/books --tokenizer llama-2/tokenizer.model
      phalanx data prepare books/ --out data/books-8k --pack --seq-len 8192
      phalanx data prepare chats.jsonl --layout chat --tokenizer models/llama-3-instruct --seq-len 8192 --out data/chats
      phalanx data prepare s3://raw/web/*.jsonl.zst --out s3://bucket/web --workers 8
      phalanx data prepare recipe.toml --out s3://bucket/web     # by a recipe, on many workers: phalanx data prepare recipe.toml --help
    """
    chosen = ChosenWorkers(workers, dask, spark, ray, slurm)
    chosen.require_one_kind()
    in_portions = chosen.said or any(map(is_remote, (out, *text)))
    _require_options_of_layout(
        layout == "chat", pack, seq_len, tokenizer, chat_template, as_text, too_long, in_portions=in_portions
    )
    output = OutputRecipe(
        layout,
        str(chat_template or ""),
        too_long,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        held_out=held_out,
        hold_out_by=hold_out_by,
        seq_len=seq_len or 0,
    )
    source = NamedText(text, text_field, "skip" if skip_bad else on_bad, as_text)
    if in_portions:
        prepare_in_portions(source, out, output, chosen, as_json=as_json)
    else:
        prepare_here(source, out, output, as_json=as_json)


def _require_options_of_layout(
    chats: bool,
    pack: bool,
    seq_len: int | None,
    tokenizer: str,
    chat_template: Path | None,
    as_text: bool,
    too_long: str,
    *,
    in_portions: bool,
) -> None:
    """Raises ``click.UsageError`` for options that do not go together."""
    if not chats:
        if pack != (seq_len is not None):
            raise click.UsageError("--pack and --seq-len go together")
        if chat_template is not None or too_long != "drop":
            raise click.UsageError(
                "--chat-template and --too-long are about conversations: add --layout chat"
            )
        return
    if seq_len is None:
        raise click.UsageError(
            "--layout chat packs conversations whole: add --seq-len, the run's train.seq_len"
        )
    if tokenizer == "bytes" or (tokenizer == "bpe" and chat_template is None):
        raise click.UsageError(
            "--layout chat needs special tokens: add --tokenizer FOLDER, that of the model; or, for a model from nothing, --tokenizer bpe and "
            "--chat-template FILE, for which a tokenizer is trained"
        )
    if tokenizer == "bpe" and in_portions:
        raise click.UsageError(
            "a tokenizer for chats is trained in one process: leave --workers and URLs out, or give --tokenizer FOLDER"
        )
    if as_text:
        raise click.UsageError(
            "--as-text reads rows as text, and --layout chat as conversations: leave one out"
        )

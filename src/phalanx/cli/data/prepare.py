"""``phalanx data prepare``: token shards made from the user's files, with what was read as what, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import click

from phalanx.cli.data.named import NamedText, prepare_here, prepare_in_portions
from phalanx.cli.data.recipe import ChosenWorkers, PrepareCommand
from phalanx.command.options import Argument, AsJson, ExistingFile, Option, command_options
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.run.fields import ValueRange
from phalanx.store.open_store import is_remote


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    text: Annotated[tuple[str, ...], Argument()]
    out: Annotated[str, Option(metavar="FOLDER_OR_URL")]
    """Where to write: a folder, s3://, gs:// or az://."""
    tokenizer: str = "bpe"
    """"bpe", "bytes", a tokenizer.json, a tokenizer.model of sentencepiece, or a .tiktoken file."""
    vocab_size: Annotated[int, ValueRange(at_least=257)] = 32_768
    """Tokens of a trained BPE."""
    held_out: Annotated[float, click.FloatRange(0.0, 0.5, min_open=True, max_open=True)] = 0.05
    hold_out_by: Literal["name", "text"] = "name"
    """Key that decides whether a document is held out: its name, or its text, so that all copies of a text are in one split."""
    pack: bool = False
    """Put documents whole into records of --seq-len tokens."""
    seq_len: Annotated[int | None, ValueRange(at_least=2)] = None
    """With --pack: tokens of a record; the run's train.seq_len."""
    layout: Literal["text", "chat"] = "text"
    """Content of rows: texts, or conversations, of which only the assistant's words are learned."""
    chat_template: Annotated[
        ExistingFile | None,
        Option(text="With --layout chat: a Jinja template.  [default: that beside the tokenizer]"),
    ] = None
    too_long: Literal["drop", "cut"] = "drop"
    """With --layout chat: leave out conversations longer than a record, or cut them after an answer."""
    text_field: Annotated[
        str | None,
        Option(
            text='Field of JSON lines, or column of Parquet and Arrow, that holds the text, or the messages.  [default: "text", or "messages"]'
        ),
    ] = None
    as_text: bool = False
    """Read JSON lines as the text that they are, with their braces."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of files, lines and rows that hold no UTF-8 text: stop at the first, or leave them out and name them."""
    skip_bad: Annotated[bool, Option(hidden=True)] = False
    """As --on-bad skip."""
    workers: ChosenWorkers
    as_json: AsJson = False


@click.command("prepare", short_help="Turn text into token shards.", cls=PrepareCommand)
@command_options(PrepareOptions)
def prepare_command(options: PrepareOptions) -> None:
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
    options.workers.require_one_kind()
    in_portions = options.workers.is_chosen or any(map(is_remote, (options.out, *options.text)))
    _require_options_of_layout(options, in_portions=in_portions)
    output = OutputRecipe(
        options.layout,
        str(options.chat_template or ""),
        options.too_long,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        held_out=options.held_out,
        hold_out_by=options.hold_out_by,
        seq_len=options.seq_len or 0,
    )
    source = NamedText(
        options.text, options.text_field, "skip" if options.skip_bad else options.on_bad, options.as_text
    )
    if in_portions:
        prepare_in_portions(source, options.out, output, options.workers, as_json=options.as_json)
    else:
        prepare_here(source, options.out, output, as_json=options.as_json)


def _require_options_of_layout(options: PrepareOptions, *, in_portions: bool) -> None:
    """Raises ``click.UsageError`` for options that do not go together."""
    tokenizer = options.tokenizer
    if options.layout != "chat":
        if options.pack != (options.seq_len is not None):
            raise click.UsageError("--pack and --seq-len go together")
        if options.chat_template is not None or options.too_long != "drop":
            raise click.UsageError(
                "--chat-template and --too-long are about conversations: add --layout chat"
            )
        return
    if options.seq_len is None:
        raise click.UsageError(
            "--layout chat packs conversations whole: add --seq-len, the run's train.seq_len"
        )
    if tokenizer == "bytes" or (tokenizer == "bpe" and options.chat_template is None):
        raise click.UsageError(
            "--layout chat needs special tokens: add --tokenizer FOLDER, that of the model; or, for a model from nothing, --tokenizer bpe and "
            "--chat-template FILE, for which a tokenizer is trained"
        )
    if tokenizer == "bpe" and in_portions:
        raise click.UsageError(
            "a tokenizer for chats is trained in one process: leave --workers and URLs out, or give --tokenizer FOLDER"
        )
    if options.as_text:
        raise click.UsageError(
            "--as-text reads rows as text, and --layout chat as conversations: leave one out"
        )

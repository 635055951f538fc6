"""``phalanx data prepare``: token shards from the user's files, with the format of each file and the
documents that were left out.

This process prepares named files itself, or splits them into portions for any number of workers. A recipe has
a command of its own (``phalanx.cli.data.recipe``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.cli.data.recipe import ChosenWorkers, PrepareCommand, carried_out
from phalanx.cli.data.report import (
    PrepareProgress,
    facts_of_files,
    in_number,
    lines_of_counts,
    lines_of_files,
    print_left_out,
    report,
)
from phalanx.cli.errors import explained
from phalanx.command import Argument, AsJson, ExistingFile, FiniteRange, Heading, Option, command_options
from phalanx.data.chat.encode import ChatLayout
from phalanx.data.chat.template import read_bare_template, template_beside
from phalanx.data.errors import DataError
from phalanx.data.formats.document import ReadOptions
from phalanx.data.portions.drive import place_named_files, recipe_of_files
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.data.preparing.files import CORPORA, Files
from phalanx.data.preparing.prepare import prepare
from phalanx.data.stored.index import DatasetIndex
from phalanx.run.fields import ValueRange
from phalanx.store.open_store import is_remote
from phalanx.store.store import StoreError

# Preparation of named files, by this process or in portions.


@dataclass(frozen=True)
class NamedText:
    """Files, folders and globs that are named, and how they are read."""

    names: tuple[str, ...]
    text_field: str | None
    on_bad: Literal["stop", "skip"]
    as_text: bool


def prepare_in_portions(
    text: NamedText, out: str, output: OutputRecipe, workers: ChosenWorkers, *, as_json: bool
) -> None:
    """Prepare the text by ``workers`` into ``out``, a folder or a URL, and print the format of each file and what
    was left out.

    Raises ``click.UsageError`` for a corpus that ships with the program, and ``click.ClickException`` for other
    errors.
    """
    corpus = next((name for name in text.names if name in CORPORA and not Path(name).exists()), None)
    if corpus is not None:
        raise click.UsageError(
            f"{corpus} is a corpus of this machine that one process prepares in a moment: leave out --workers and the like, and for a store "
            f"bring the finished dataset there (phalanx data copy FOLDER {out if '://' in out else 'URL'})"
        )
    recipe = recipe_of_files(
        text.names, output, text_field=text.text_field, on_bad=text.on_bad, as_text=text.as_text
    )
    with explained(DataError, StoreError):
        place, planned = place_named_files(text.names, recipe, out)
        print_left_out(planned.corpus)
        dataset = carried_out(place, workers, quiet=as_json)
    facts = facts_of_files(planned.plan.formats, planned.corpus)
    bad = planned.corpus.report.bad_count + dataset.counts.get("dropped: bad", 0)
    facts |= {"counts": dataset.counts, "xz_bits_per_byte": None, "left_out_count": bad}
    lines = (*lines_of_counts(dataset.counts), *lines_of_files(planned.plan.formats, planned.corpus))
    report(out, dataset, lines, facts, by_recipe=False, as_json=as_json)


def prepare_here(text: NamedText, out: str, output: OutputRecipe, *, as_json: bool) -> None:
    """Prepare the text in this process into the folder ``out``, and print the format of each file and what was left
    out.

    An interruption leaves ``out`` as it was, prints that, and is raised. Raises ``click.ClickException`` for other
    errors.
    """
    from phalanx.train.start.prepare import documents_of

    chats = output.layout == "chat"
    with explained(DataError):
        options = ReadOptions(text.text_field, chats)
        documents = documents_of(text.names, options, on_bad=text.on_bad, json_as_text=text.as_text, out=out)
        files = documents if isinstance(documents, Files) else None
        try:
            with PrepareProgress(files, quiet=as_json) as progress:
                dataset = prepare(
                    documents,
                    Path(out),
                    tokenizer=output.tokenizer,
                    vocab_size=output.vocab_size if output.tokenizer == "bpe" else None,
                    held_out_fraction=output.held_out,
                    hold_out_by=output.hold_out_by,
                    packed_seq_len=output.seq_len,
                    chat=_chat_layout(output, text.on_bad) if chats else None,
                    on_progress=progress,
                )
        except KeyboardInterrupt:
            click.echo(f"\ninterrupted: {out} is as it was, and nothing half-written is left", err=True)
            raise
    index = dataset.index
    facts: dict[str, object] = {"xz_bits_per_byte": index.held_out_xz_bits_per_byte}
    lines: list[str] = []
    if files is None:
        facts |= {"left_out": [], "left_out_count": 0}
    else:
        print_left_out(files)
        formats = [file.format for file in files.files]
        facts |= {"without_text": files.report.without_text, **facts_of_files(formats, files)}
        lines += lines_of_files(formats, files)
    if chats:
        facts["conversations"] = index.train.documents + index.held_out.documents
        facts["learned_tokens"] = index.train.learned + index.held_out.learned
        facts["left_out_conversations"] = index.train.left_out + index.held_out.left_out
        lines += _chat_lines(index, text.on_bad)
    report(out, dataset, lines, facts, by_recipe=False, as_json=as_json)


def _chat_layout(output: OutputRecipe, on_bad: Literal["stop", "skip"]) -> ChatLayout:
    """Return the layout with the chat template in the named file, or else that beside the tokenizer.

    Raises ``TokenizerError`` if there is none.
    """
    if output.tokenizer == "bpe":
        template = read_bare_template(Path(output.chat_template))
    else:
        file = Path(output.chat_template) if output.chat_template else None
        template = template_beside(Path(output.tokenizer), file)
    return ChatLayout(template, output.too_long, on_bad)


def _chat_lines(index: DatasetIndex, on_bad: Literal["stop", "skip"]) -> Iterator[str]:
    """Yield lines on conversations: how many, the share of learned tokens, and a warning if some were left out."""
    train, held_out = index.train, index.held_out
    yield f"{in_number(train.documents, 'conversation')} to train on, {train.learned / max(1, train.tokens):.1%} of their tokens learned"
    if left_out := train.left_out + held_out.left_out:
        total = left_out + train.documents + held_out.documents
        reason = (
            f"{'bad or ' if on_bad == 'skip' else ''}longer than a record of {index.packed_seq_len:,} tokens"
        )
        yield (
            f"warning: {left_out:,} of {in_number(total, 'conversation')} left out, being {reason}: a larger --seq-len or --too-long cut keeps "
            "long ones"
        )


# The command and its options.


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    text: Annotated[tuple[str, ...], Argument()]
    out: Annotated[str, Option(metavar="FOLDER_OR_URL"), Heading("Dataset")]
    """Where to write: a folder, s3://, gs:// or az://."""
    tokenizer: Annotated[str, Heading("Tokenizer")] = "bpe"
    """"bpe", "bytes", a tokenizer.json, a tokenizer.model of sentencepiece, or a .tiktoken file."""
    vocab_size: Annotated[int, ValueRange(at_least=257)] = 32_768
    """Tokens of a trained BPE."""
    held_out: Annotated[float, FiniteRange(0.0, 0.5, min_open=True, max_open=True), Heading("Dataset")] = 0.05
    hold_out_by: Literal["name", "text"] = "name"
    """Key that decides whether a document is held out: its name, or its text, so that all copies of a text are in one split."""
    pack: bool = False
    """Keep documents complete, in records of --seq-len tokens."""
    seq_len: Annotated[int | None, ValueRange(at_least=2)] = None
    """With --pack: tokens of a record; the run's train.seq_len."""
    layout: Annotated[Literal["text", "chat"], Heading("Conversations")] = "text"
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
        Heading("Input"),
    ] = None
    as_text: bool = False
    """Read JSON lines as plain text, with their braces."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of files, lines and rows that hold no UTF-8 text: stop at the first, or leave them out and name them."""
    skip_bad: Annotated[bool, Option(hidden=True)] = False
    """As --on-bad skip."""
    workers: Annotated[ChosenWorkers, Heading("Workers")]
    as_json: AsJson = False


@click.command("prepare", short_help="Turn text into token shards.", cls=PrepareCommand)
@command_options(PrepareOptions)
def prepare_command(options: PrepareOptions) -> None:
    """Turn TEXT (files, folders, globs, or a known corpus) into token shards in --out.

    Files are UTF-8 text, JSON lines, Parquet or Arrow; their content decides which. Text and JSON lines may
    be compressed by gzip, zstd, xz or bzip2. Folders may be those that Hugging Face datasets saved.

    With --workers, a cluster, or URLs of object stores, the text is prepared in portions, as with a recipe,
    by any number of workers. If the preparation is interrupted, run the same command again to resume it.

    If --out has the dataset of the same text and options already, it is kept. Another dataset there is an error.

    \b
      phalanx data prepare books/ --out data/books
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
    """Raise ``click.UsageError`` for options that do not fit the layout.

    Text: --pack without --seq-len or the reverse, and chat options. Chat: no --seq-len, a tokenizer without special
    tokens, a new tokenizer in portions, or --as-text.
    """
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

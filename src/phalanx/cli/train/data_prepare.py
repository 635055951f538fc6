"""``phalanx data prepare``: token shards made from the user's files, with what was read as what, and what was left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from phalanx.cli.errors import explained
from phalanx.cli.train.data_named import prepare_in_portions, say_array
from phalanx.cli.train.data_recipe import PrepareCommand
from phalanx.cli.train.data_workers import ChosenWorkers, worker_options
from phalanx.cli.train.prepare_progress import PrepareProgress
from phalanx.data.errors import DataError, TokenizerError
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.store.open_store import is_remote

if TYPE_CHECKING:
    from phalanx.data.chat.encode import ChatLayout
    from phalanx.data.preparing.files import Files
    from phalanx.data.stored.index import DatasetIndex


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
    chats = layout == "chat"
    _require_options_of_layout(chats, pack, seq_len, tokenizer, chat_template, as_text, too_long)
    chosen = ChosenWorkers(workers, dask, spark, ray, slurm)
    chosen.require_one_kind()
    bad = "skip" if skip_bad else on_bad
    if chosen.said or any(map(is_remote, (out, *text))):
        output = OutputRecipe(
            layout,
            str(chat_template or ""),
            too_long,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            held_out=held_out,
            seq_len=seq_len or 0,
        )
        prepare_in_portions(
            text, out, output, chosen, text_field=text_field, on_bad=bad, as_text=as_text, as_json=as_json
        )
        return
    from phalanx.data.formats.document import ReadOptions
    from phalanx.data.preparing.files import Files
    from phalanx.data.preparing.prepare import prepare
    from phalanx.train.start.prepare import documents_of

    with explained(DataError):
        documents = documents_of(text, ReadOptions(text_field, chats), on_bad=bad, json_as_text=as_text)
        chat = _chat_layout(Path(tokenizer), chat_template, too_long, bad) if chats else None
        files = documents if isinstance(documents, Files) else None
        progress = None if as_json else PrepareProgress(files)
        try:
            info = prepare(
                documents,
                Path(out),
                tokenizer=tokenizer,
                vocab_size=vocab_size if tokenizer == "bpe" else None,
                held_out_fraction=held_out,
                packed_seq_len=seq_len or 0,
                chat=chat,
                on_progress=progress,
            )
        except KeyboardInterrupt:
            click.echo(f"\ninterrupted: {out} is as it was, and nothing half-written is left", err=True)
            raise
        finally:
            if progress is not None:
                progress.close()
    if files is not None:
        _show_left_out(files)
        for path in files.arrays():
            say_array(path)
    facts = {
        "path": out,
        "reused": info.reused,
        "vocab_size": info.vocab_size,
        "train_tokens": info.index.train.tokens,
        "held_out_tokens": info.index.held_out.tokens,
        "xz_bits_per_byte": info.held_out_xz_bits_per_byte,
        "fingerprint": info.fingerprint,
        "padding": info.index.train.padding / max(1, info.index.train.tokens),
        **_chat_facts(info.index),
        **_read_facts(files),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{out}: {'was there already' if info.reused else 'written'}")
    if files is not None:
        click.echo(f"  {what_was_read(files)}")
        if files.report.without_text:
            click.echo(f"  without text: {_count(files.report.without_text, 'document')}")
        if files.aside:
            click.echo(
                f"  not read, since they describe data beside them: {', '.join(map(str, files.aside[:3]))}"
                + (f" and {len(files.aside) - 3} more" if len(files.aside) > 3 else "")
            )
    click.echo(f"  {facts['train_tokens']:,} tokens to train on, {facts['held_out_tokens']:,} held out")
    if seq_len:
        padding = f"{facts['padding']:.3%} of them padding"
        few = (
            "; documents are too few to fill them better"
            if info.index.train.padding > 0.01 * info.index.train.tokens
            else ""
        )
        click.echo(f"  packed whole into records of {seq_len:,} tokens, {padding}{few}")
    if chats:
        train = info.index.train
        click.echo(
            f"  {_count(train.documents, 'conversation')} to train on, {train.learned / max(1, train.tokens):.1%} of their tokens learned; "
            f"left out, being {'bad or ' if bad == 'skip' else ''}longer than a record: {train.left_out + info.index.held_out.left_out:,}"
        )
    if files is not None and files.report.bad_count:
        click.echo(f"  left out as bad: {files.report.bad_count:,}, named above")
    click.echo(f"  vocabulary {info.vocab_size:,}; fingerprint {info.fingerprint[:16]}")


def _require_options_of_layout(
    chats: bool,
    pack: bool,
    seq_len: int | None,
    tokenizer: str,
    chat_template: Path | None,
    as_text: bool,
    too_long: str,
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
    if tokenizer in ("bpe", "bytes"):
        raise click.UsageError(
            "--layout chat needs the model's own tokenizer: add --tokenizer FOLDER, that of the model"
        )
    if as_text:
        raise click.UsageError(
            "--as-text reads rows as text, and --layout chat as conversations: leave one out"
        )


def _chat_layout(
    tokenizer: Path, template: Path | None, too_long: Literal["drop", "cut"], on_bad: Literal["stop", "skip"]
) -> ChatLayout:
    """The layout with a template in a file, or that beside the tokenizer. Raises ``TokenizerError`` if there is none."""
    from phalanx.data.chat.encode import ChatLayout
    from phalanx.data.chat.template import ChatTemplateError, read_chat_template

    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        return ChatLayout(read_chat_template(folder, template), too_long, on_bad)
    except ChatTemplateError as error:
        raise TokenizerError(f"{error}: name one with --chat-template") from error


def _chat_facts(index: DatasetIndex) -> dict[str, object]:
    if index.recipe.chat is None:
        return {}
    both = (index.train, index.held_out)
    return {
        "conversations": sum(split.documents for split in both),
        "learned_tokens": sum(split.learned for split in both),
        "left_out_conversations": sum(split.left_out for split in both),
    }


def what_was_read(files: Files) -> str:
    """Such as "3 files: 1 jsonl (12,031 documents), 1 parquet (8,000 documents), 1 text (1 document)"."""
    by_format = Counter(str(file.format) for file in files.files)
    parts = (
        f"{count:,} {form} ({_count(files.report.documents[form], 'document')})"
        for form, count in sorted(by_format.items())
    )
    return f"{_count(len(files.files), 'file')}: {', '.join(parts)}"


def _read_facts(files: Files | None) -> dict[str, object]:
    if files is None:
        return {"left_out": [], "left_out_count": 0}
    by_format = Counter(str(file.format) for file in files.files)
    report = files.report
    return {
        "read": {
            form: {"files": count, "documents": report.documents[form]}
            for form, count in sorted(by_format.items())
        },
        "without_text": report.without_text,
        "not_read": [str(path) for path in files.aside],
        "left_out": [f"{bad.path}, {bad.place}" if bad.place else str(bad.path) for bad in report.bad],
        "left_out_count": report.bad_count,
    }


def _show_left_out(files: Files) -> None:
    report = files.report
    for bad in report.bad:
        click.echo(f"left out: {bad}", err=True)
    if report.bad_count > len(report.bad):
        click.echo(f"left out: {report.bad_count - len(report.bad):,} more", err=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

"""``phalanx data prepare FILES``: files that are named, prepared by this process, or in portions by any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from phalanx.cli.data.progress import PrepareProgress
from phalanx.cli.data.recipe import ChosenWorkers, carried_out
from phalanx.cli.data.report import (
    facts_of_files,
    in_number,
    lines_of_counts,
    lines_of_files,
    print_left_out,
    report,
)
from phalanx.cli.errors import explained
from phalanx.data.chat.encode import ChatLayout
from phalanx.data.chat.template import read_bare_template, template_beside
from phalanx.data.errors import DataError
from phalanx.data.formats.document import ReadOptions
from phalanx.data.portions.drive import place_named_files, recipe_of_files
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.data.preparing.files import CORPORA, Files
from phalanx.data.preparing.prepare import prepare
from phalanx.data.stored.index import DatasetIndex
from phalanx.store.store import StoreError


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
    """Prepare the text into ``out``, a folder or a URL, and print what was read as what and what was left out."""
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
    """The same in this process."""
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
        facts |= _chat_facts(index)
        lines += _chat_lines(index, text.on_bad)
    report(out, dataset, lines, facts, by_recipe=False, as_json=as_json)


def _chat_layout(output: OutputRecipe, on_bad: Literal["stop", "skip"]) -> ChatLayout:
    """The layout with a template in a file, or that beside the tokenizer. Raises ``TokenizerError`` if there is none."""
    if output.tokenizer == "bpe":
        template = read_bare_template(Path(output.chat_template))
    else:
        file = Path(output.chat_template) if output.chat_template else None
        template = template_beside(Path(output.tokenizer), file)
    return ChatLayout(template, output.too_long, on_bad)


def _chat_facts(index: DatasetIndex) -> dict[str, object]:
    both = (index.train, index.held_out)
    return {
        "conversations": sum(split.documents for split in both),
        "learned_tokens": sum(split.learned for split in both),
        "left_out_conversations": sum(split.left_out for split in both),
    }


def _chat_lines(index: DatasetIndex, on_bad: Literal["stop", "skip"]) -> Iterator[str]:
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

"""Files named on the command line as a plan: the short form of a preparation, with the documents, the order and the splits of ``phalanx.data.preparing.prepare``.

A recipe's files come in the order of their URLs, and names alone decide what is held out. Files that are named come in the order of their names, those that
only describe data are left aside, and of so few documents that a split would be empty, the end of the largest is held out. To know that, documents are
read until one of each split has been met, which are a few dozen of many, and all of few.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.portions.planning.plan import PreparationPlan, make_plan
from phalanx.data.portions.planning.raw_files import RawFile, list_raw_files
from phalanx.data.portions.planning.recipe import OutputRecipe, PreparationRecipe, RawSource, read_options
from phalanx.data.portions.work.read_portion import read_portion
from phalanx.data.preparing.files import Files, files_of, local_path
from phalanx.data.preparing.splits import held_out_end
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.store.open_store import is_remote, is_url


@dataclass(frozen=True)
class NamedFilesPlan:
    """The plan of files that were named, and what of them is not in it."""

    plan: PreparationPlan
    tokenizer: Tokenizer | None
    """The one that was given; ``None`` if it is to be trained."""
    corpus: Files
    """The files that have paths, which are read by their portions."""


def recipe_of_files(
    named: Sequence[str],
    output: OutputRecipe,
    *,
    text_field: str | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    as_text: bool = False,
) -> PreparationRecipe:
    """The recipe of files, folders and globs, paths or URLs, that are named; paths in it are absolute, so that it says the same from anywhere."""
    field = RawSource.text_field if text_field is None else text_field
    given = output.tokenizer if output.tokenizer in ("bpe", "bytes") else os.path.abspath(output.tokenizer)
    template = os.path.abspath(output.chat_template) if output.chat_template else ""
    return PreparationRecipe(
        tuple(
            RawSource(one if is_url(one) else os.path.abspath(one), field, on_bad, as_text) for one in named
        ),
        replace(output, tokenizer=given, chat_template=template),
    )


def plan_named_files(named: Sequence[str], recipe: PreparationRecipe, out: str = "") -> NamedFilesPlan:
    """The plan of a recipe that ``recipe_of_files`` made of the same names, for a dataset at ``out``. Raises ``CorpusError``, ``TokenizerError`` and ``StoreError``."""
    local = {number: local_path(one) for number, one in enumerate(named) if not is_remote(one)}
    files: list[RawFile] = []
    corpus = Files((), ReadOptions())
    if local:
        # What is said of one is said of all, so that whichever of them named a file makes no difference.
        first = next(iter(local))
        source = recipe.source[first]
        corpus = files_of(
            list(local.values()),
            read_options(recipe, first),
            on_bad=source.on_bad,
            json_as_text=source.as_text,
            out=out,
        )
        files = [
            RawFile(str(file.path.resolve()), file.name, file.bytes, str(file.modified_ns), first)
            for file in corpus.files
            if file.bytes
        ]
    for number in range(len(named)):
        if number not in local:
            there = list_raw_files([recipe.source[number]], Path(), out)
            files += [replace(file, source=number) for file in there]
    twice = next((url for url, count in Counter(file.url for file in files).items() if count > 1), None)
    if twice is not None:
        raise CorpusError(f"{twice} is named twice; name each file once, since it is read once")
    files.sort(key=lambda file: (file.name, file.url))
    plan, tokenizer = make_plan(recipe, Path(), files)
    if recipe.output.held_out:
        urls = [file.url for file in plan.files]
        divisible = recipe.output.layout == "text"
        end = held_out_end(_documents(plan), plan.split_rule, urls, divisible=divisible)
        plan = replace(plan, held_out_end=end)
    return NamedFilesPlan(plan, tokenizer, corpus)


def _documents(plan: PreparationPlan) -> Iterator[tuple[int, int, Document]]:
    """(portion, number among its documents with text, document) of each document."""
    for portion in range(len(plan.portions)):
        texts = (document for _, document in read_portion(plan, portion) if document and document.text)
        for number, document in enumerate(texts):
            yield portion, number, document

"""The recipe of a prepared dataset: a TOML file that specifies how raw files become tokens.

All settings that affect the output are in the recipe. The number of workers and the engine are not. The reader of run files parses it, so all
mistakes are reported together, each with the nearest valid word.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from phalanx.data.formats.document import ReadOptions
from phalanx.data.steps.choose import AnyStep, read_steps
from phalanx.run.directory.files import read_named
from phalanx.run.fields import JsonObject, Problem, RunFileError, ValueRange, read_section


@dataclass(frozen=True)
class RawSource:
    """One ``[[source]]``: raw files of one kind."""

    url: str
    """A file, a folder (all visible files below it) or a glob (``*``, ``**``, ``?``); a path, or a URL of an object store."""
    text_field: str = "text"
    """Field of JSON lines, or column of tables, with the text. For conversations, the default is "messages"."""
    on_bad: Literal["stop", "skip"] = "stop"
    """For a line or file without text: stop the preparation with an error, or skip and count it."""
    as_text: bool = False
    """Read JSON lines as plain text, including braces."""


@dataclass(frozen=True)
class OutputRecipe:
    """``[output]``: options for turning texts into shards of tokens."""

    layout: Literal["text", "chat"] = "text"
    """Rows are texts, or conversations with a loss only on the assistant's text (``phalanx.data.chat``)."""
    chat_template: str = ""
    """Path of a Jinja template for conversations; if empty, the template beside the tokenizer."""
    too_long: Literal["drop", "cut"] = "drop"
    """Leave out conversations longer than a record, or cut them after an answer."""
    template: str = ""
    """The template's text. The plan sets it and the special tokens."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = "bpe"
    """"bpe" (trained on a sample of the training split), "bytes", or the path of a byte-level ``tokenizer.json``."""
    vocab_size: Annotated[int, ValueRange(at_least=257)] = 32_768
    """Maximum number of tokens of a trained BPE tokenizer."""
    tokenizer_bytes: Annotated[int, ValueRange(at_least=1)] = 1 << 30
    """Maximum bytes of text to train a BPE tokenizer on, from evenly spaced portions."""
    seq_len: Annotated[int, ValueRange(at_least=0)] = 0
    """Tokens of a record into which documents are packed; 0 joins documents end to end."""
    length_classes: tuple[int, ...] = ()
    """Increasing limits of length classes, in tokens. Only documents of one class, or longer than all, are packed together. Empty: one class."""
    held_out: Annotated[float, ValueRange(at_least=0, below=1)] = 0.001
    """Share of documents held out."""
    hold_out_by: Literal["name", "text"] = "name"
    """Part of a document whose hash decides its split: its name, or its text in normal form. With "text", all copies of a text are in
    one split, and file names do not matter."""
    shard_mib: Annotated[int, ValueRange(at_least=1, at_most=1 << 14)] = 256
    """Maximum size of a shard. A worker keeps one shard of each split in memory."""
    portion_bytes: Annotated[int, ValueRange(at_least=0)] = 0
    """Stored bytes of raw files in a portion. 0 means 64 MiB, or more to have at most 32,768 portions."""


@dataclass(frozen=True)
class NearDuplicates:
    """``[dedup.near]``: MinHash over n-grams of words, in bands (``phalanx.data.dedup``)."""

    bands: Annotated[int, ValueRange(at_least=1)] = 14
    rows: Annotated[int, ValueRange(at_least=1)] = 8
    ngram: Annotated[int, ValueRange(at_least=1)] = 5
    least_similarity: Annotated[float, ValueRange(at_least=0, at_most=1)] = 0.65
    """Minimum estimated similarity of near duplicates that agree in a band."""


@dataclass(frozen=True)
class Deduplication:
    """``[dedup]``: of documents with equal or similar text, only the first is kept."""

    exact: bool = True
    near: NearDuplicates | None = None


@dataclass(frozen=True)
class PreparationRecipe:
    """A complete recipe file."""

    source: tuple[RawSource, ...] = ()
    output: OutputRecipe = field(default_factory=OutputRecipe)
    step: tuple[AnyStep, ...] = ()
    """Steps applied to each document, in order."""
    dedup: Deduplication | None = None


def read_recipe(path: Path) -> PreparationRecipe:
    """Return the recipe in the TOML file at ``path``. Raises ``RunFileError`` with all mistakes, also if it cannot be read."""
    try:
        table = tomllib.loads(read_named(path))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise RunFileError(path, [Problem("", problem, "give the path of a recipe, a TOML file")]) from None
    except (ValueError, RecursionError) as error:
        raise RunFileError(path, [Problem("", f"not valid TOML: {error}", "see https://toml.io")]) from None
    problems: list[Problem] = []
    recipe = recipe_of(table, problems)
    if recipe is None or problems:
        raise RunFileError(path, problems)
    return recipe


def recipe_of(table: Mapping[str, object], problems: list[Problem]) -> PreparationRecipe | None:
    """Return the recipe that ``table`` describes; mistakes of fields and of their combinations are added to
    ``problems``. ``None`` if the sections cannot be read.
    """
    # A step's fields depend on its kind, which the reader of sections does not support.
    sections = {name: section for name, section in table.items() if name != "step"}
    recipe = read_section(PreparationRecipe, sections, problems)
    steps = read_steps(table.get("step", ()), problems)
    if recipe is not None:
        recipe = replace(recipe, step=steps)
        if not recipe.source and "source" not in table:
            problems.append(
                Problem("source", "is missing", 'add [[source]] with url = "FOLDER, GLOB or URL"')
            )
        if recipe.dedup is not None and not recipe.dedup.exact and recipe.dedup.near is None:
            problems.append(Problem("dedup", "has no effect", "exact = true, or near = {}, or leave it out"))
        problems += _chat_problems(recipe.output)
        if recipe.output.seq_len == 1:
            problems.append(
                Problem("output.seq_len", "1 holds no token and its target", "2 or more, or 0 to join")
            )
        problems += _class_problems(recipe.output)
    return recipe


def _chat_problems(output: OutputRecipe) -> Iterator[Problem]:
    """Yield a problem for each missing setting that conversations need: ``output.seq_len``, and an existing tokenizer.

    Yield one also for ``chat_template`` and ``too_long`` if the output is not conversations.
    """
    chats = output.layout == "chat"
    if chats and not output.seq_len:
        yield Problem(
            "output.seq_len", "is missing, and conversations are packed whole", "the run's train.seq_len"
        )
    if chats and output.tokenizer in ("bpe", "bytes"):
        remedy = "the folder of the model that is to learn them, or its tokenizer.json"
        yield Problem("output.tokenizer", f"{output.tokenizer!r} has no chat template", remedy)
    for name, is_set in (("chat_template", output.chat_template), ("too_long", output.too_long != "drop")):
        if is_set and not chats:
            yield Problem(f"output.{name}", "is about conversations", 'layout = "chat", or leave it out')


def _class_problems(output: OutputRecipe) -> Iterator[Problem]:
    """Yield problems of length classes, which need packed documents and must increase."""
    classes = output.length_classes
    if classes and not output.seq_len:
        yield Problem(
            "output.length_classes",
            "is about documents that are packed, and output.seq_len joins them",
            "set output.seq_len to the tokens of a record, or leave it out",
        )
    if list(classes) != sorted(set(classes)) or any(length < 2 for length in classes):
        yield Problem(
            "output.length_classes",
            f"{list(classes)} are not rising numbers of tokens",
            "such as [4096, 32768], each 2 or more",
        )


def read_options(recipe: PreparationRecipe, source: int) -> ReadOptions:
    """Return the options for reading documents from the files of a source."""
    chats, name = recipe.output.layout == "chat", recipe.source[source].text_field
    return ReadOptions(None if chats and name == RawSource.text_field else name, chats)


def recipe_table(recipe: PreparationRecipe) -> JsonObject:
    """Return the recipe as plain values for ``recipe_of``.

    Fields that earlier releases did not have are omitted at their defaults, so that the plan's text, which identifies it, does not change.
    """
    table = asdict(recipe)
    for source in table["source"]:
        if not source["as_text"]:
            del source["as_text"]
    if not recipe.output.length_classes:
        del table["output"]["length_classes"]
    if recipe.output.hold_out_by == "name":
        del table["output"]["hold_out_by"]
    return table


def differences(first: object, second: object, path: str = "") -> list[str]:
    """Return dotted names of the fields in which two tables of plain values differ.

    A missing field counts as None. Fields of a table are sorted; lists of unequal length differ as a whole.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        return [
            name
            for key in sorted({*first, *second})
            for name in differences(first.get(key), second.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [name for number, pair in pairs for name in differences(*pair, f"{path}[{number}]")]
    return [] if first == second else [path]


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()

"""The recipe of a prepared dataset: a TOML file that says which raw files become which tokens.

Whatever decides a byte of the output stands here and nowhere else; how many workers there are, and on which engine, does not. A file is read
with the reader of run files, so that every mistake in it is named at once with the nearest right word.
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
from phalanx.run.fields import JsonObject, Problem, RunFileError, ValueRange, read_section


@dataclass(frozen=True)
class RawSource:
    """One ``[[source]]``: raw files of one kind."""

    url: str
    """A file, a folder (all visible files below it) or a glob (``*``, ``**``, ``?``); a path, or a URL of an object store."""
    text_field: str = "text"
    """Field of JSON lines, or column of tables, that holds the text; of conversations "messages", unless it is another one."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What a line or file that holds no text does: end the preparation with its name, or be left out and counted."""
    as_text: bool = False
    """Read JSON lines as the text that they are, with their braces."""


@dataclass(frozen=True)
class OutputRecipe:
    """``[output]``: how texts become shards of tokens."""

    layout: Literal["text", "chat"] = "text"
    """Rows are texts, or conversations, of which only the assistant's words are learned (``phalanx.data.chat``)."""
    chat_template: str = ""
    """The path of a Jinja template for conversations; empty is the one beside the tokenizer."""
    too_long: Literal["drop", "cut"] = "drop"
    """Leave out conversations longer than a record, or cut them after an answer."""
    template: str = ""
    """The template's text, which the plan enters, as it does the special tokens that it may name."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = "bpe"
    """"bpe" (trained on a sample of the training split), "bytes", or the path of a byte-level ``tokenizer.json``."""
    vocab_size: Annotated[int, ValueRange(at_least=257)] = 32_768
    """Tokens of a BPE that is trained, at most."""
    tokenizer_bytes: Annotated[int, ValueRange(at_least=1)] = 1 << 30
    """Bytes of text that a BPE is trained on, at most: taken from portions that are spread evenly."""
    seq_len: Annotated[int, ValueRange(at_least=0)] = 0
    """Tokens of a record that documents are packed into whole; 0 joins them end to end."""
    length_classes: tuple[int, ...] = ()
    """Lengths in tokens, rising, up to which documents are packed with each other alone; longer ones likewise. Empty packs all together."""
    held_out: Annotated[float, ValueRange(at_least=0, below=1)] = 0.001
    """Share of documents held out."""
    hold_out_by: Literal["name", "text"] = "name"
    """The part of a document whose hash decides whether it is held out: its name, or of its text in normal form. With "text" all copies of a text are in one split,
    and names of files do not matter."""
    shard_mib: Annotated[int, ValueRange(at_least=1, at_most=1 << 14)] = 256
    """Size of a shard at most; a worker holds one of each split in memory."""
    portion_bytes: Annotated[int, ValueRange(at_least=0)] = 0
    """Bytes of raw files, as stored, in a portion; 0 is 64 MiB, or more so that there are 32,768 portions at most."""


@dataclass(frozen=True)
class NearDuplicates:
    """``[dedup.near]``: MinHash over n-grams of words, in bands (``phalanx.data.dedup``)."""

    bands: Annotated[int, ValueRange(at_least=1)] = 14
    rows: Annotated[int, ValueRange(at_least=1)] = 8
    ngram: Annotated[int, ValueRange(at_least=1)] = 5
    least_similarity: Annotated[float, ValueRange(at_least=0, at_most=1)] = 0.65
    """Estimated similarity below which two documents that agree in a band are none the less different."""


@dataclass(frozen=True)
class Deduplication:
    """``[dedup]``: of documents with the same or almost the same text, the first stays."""

    exact: bool = True
    near: NearDuplicates | None = None


@dataclass(frozen=True)
class PreparationRecipe:
    """A whole recipe file."""

    source: tuple[RawSource, ...] = ()
    output: OutputRecipe = field(default_factory=OutputRecipe)
    step: tuple[AnyStep, ...] = ()
    """What each document goes through, in order."""
    dedup: Deduplication | None = None


def read_recipe(path: Path) -> PreparationRecipe:
    """The recipe in the TOML file at ``path``. Raises ``RunFileError`` with everything that is wrong with it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise RunFileError(path, [Problem("", found, "give the path of a recipe, a TOML file")]) from None
    except (ValueError, RecursionError) as error:
        raise RunFileError(path, [Problem("", f"not valid TOML: {error}", "see https://toml.io")]) from None
    problems: list[Problem] = []
    recipe = recipe_of(table, problems)
    if recipe is None or problems:
        raise RunFileError(path, problems)
    return recipe


def recipe_of(table: Mapping[str, object], problems: list[Problem]) -> PreparationRecipe | None:
    """The recipe that ``table`` describes; mistakes are added to ``problems``."""
    # A step's fields depend on its kind, which the reader of sections does not know.
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
            problems.append(
                Problem("dedup", "asks for nothing", "exact = true, or near = {}, or leave it out")
            )
        problems += _chat_problems(recipe.output)
        if recipe.output.seq_len == 1:
            problems.append(
                Problem("output.seq_len", "1 holds no token and its target", "2 or more, or 0 to join")
            )
        problems += _class_problems(recipe.output)
    return recipe


def _chat_problems(output: OutputRecipe) -> Iterator[Problem]:
    """What conversations need, and what is about them alone."""
    chats = output.layout == "chat"
    if chats and not output.seq_len:
        yield Problem(
            "output.seq_len", "is missing, and conversations are packed whole", "the run's train.seq_len"
        )
    if chats and output.tokenizer in ("bpe", "bytes"):
        remedy = "the folder of the model that is to learn them, or its tokenizer.json"
        yield Problem("output.tokenizer", f"{output.tokenizer!r} has no chat template", remedy)
    for name, given in (("chat_template", output.chat_template), ("too_long", output.too_long != "drop")):
        if given and not chats:
            yield Problem(f"output.{name}", "is about conversations", 'layout = "chat", or leave it out')


def _class_problems(output: OutputRecipe) -> Iterator[Problem]:
    """Classes of lengths are of packed documents, and rise."""
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
    """How documents are taken from the files of a source."""
    chats, name = recipe.output.layout == "chat", recipe.source[source].text_field
    return ReadOptions(None if chats and name == RawSource.text_field else name, chats)


def recipe_table(recipe: PreparationRecipe) -> JsonObject:
    """The recipe as plain values, which ``recipe_of`` reads back.

    A field that plans of earlier releases did not have is left out at its default: their text, which is their identity, stays what it is.
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


def differences(found: object, wanted: object, path: str = "") -> list[str]:
    """Dotted names of the fields in which two tables of plain values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            name
            for key in sorted({*found, *wanted})
            for name in differences(found.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [name for number, pair in pairs for name in differences(*pair, f"{path}[{number}]")]
    return [] if found == wanted else [path]


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()

"""Steps by the name that a recipe gives in ``use``: rules, decontamination, functions of the user's own, filters of datatrove."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import xxhash

from phalanx.data.errors import PreparationError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.formats.read import documents, recognize, spans
from phalanx.data.steps.rules import C4, Characters, GopherQuality, GopherRepetition, Length, Mask
from phalanx.data.steps.step import Dropped
from phalanx.data.words import words_of
from phalanx.run.fields import Problem, ValueRange, read_section, unknown_value

# Steps that are filters of datatrove, by their names: ``use = "datatrove:GopherQualityFilter"``.
#
# The filters of Hugging Face's preparation of FineWeb (https://github.com/huggingface/datatrove); of its pipelines nothing else is used. A filter sees one document at a
# time, as a step does. Its parameters are those of its constructor; the version that is installed where the plan is made belongs to the plan, and a worker with another
# one refuses it. Many filters split words by spaCy, and some fetch a model the first time that they are used: datatrove says what it needs.

PREFIX = "datatrove:"


@dataclass(frozen=True)
class DatatroveFilter:
    """``use = "datatrove:NAME"``: drops what the filter drops, and takes the text over where it changes it."""

    use: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the filter's constructor: ``parameters = {min_doc_words = 30}``."""
    version: str = ""
    """The version of datatrove, which the plan enters."""

    def __call__(self, document: Document) -> Document | Dropped:
        given = self._document(text=document.text, id=document.name, metadata={})
        try:
            kept = self._filter.filter(given)
        except Exception as error:
            raise PreparationError(
                f"step {self.use} on document {document.name}: {type(error).__name__}: {error}"
            ) from error
        kept, reason = kept if isinstance(kept, tuple) else (kept, "")
        if not kept:
            return Dropped(f"{self.use.removeprefix(PREFIX)}{f': {reason}' if reason else ''}")
        return Document(document.name, given.text)

    @cached_property
    def _document(self) -> Any:
        return importlib.import_module("datatrove.data").Document

    @cached_property
    def _filter(self) -> Any:
        here = _installed(self.use)
        if self.version not in ("", here):
            raise PreparationError(
                f"step {self.use}: the plan was made with datatrove {self.version}, and {here} is installed here; install that version"
            )
        filters = importlib.import_module("datatrove.pipeline.filters")
        name = self.use.removeprefix(PREFIX)
        kind = getattr(filters, name, None)
        if not inspect.isclass(kind):
            known = ", ".join(sorted(one for one in dir(filters) if one.endswith("Filter")))
            raise PreparationError(f"step {self.use}: datatrove {here} has no filter {name}; it has: {known}")
        try:
            return kind(**self.parameters)
        except (TypeError, ImportError, ValueError) as error:
            raise PreparationError(f"step {self.use}: {error}") from error


def with_version(step: DatatroveFilter) -> DatatroveFilter:
    """The step with the version that is installed. Raises ``PreparationError`` if it cannot be used here as it stands."""
    complete = replace(step, version=_installed(step.use))
    _ = complete._filter
    return complete


def _installed(use: str) -> str:
    try:
        return importlib.metadata.version("datatrove")
    except importlib.metadata.PackageNotFoundError as error:
        raise PreparationError(
            f"step {use} needs the package datatrove: pip install 'phalanx-train[datatrove]', or pip install 'datatrove[processing]' spacy"
        ) from error


# Decontamination: documents that share an n-gram of words with the files of an evaluation are left out.
#
# As in Brown et al., "Language Models are Few-Shot Learners" (arXiv 2005.14165, appendix C), n is 13 and words are compared in lower case without what is no
# letter or digit. Text without spaces between words is compared by as many letters as 13 words have (``phalanx.data.words``). Of the files, n-grams are kept as 64-bit hashes: some 3 in 10^19 comparisons with each of them are wrong, on the side of dropping.

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Decontaminate:
    """Drops documents that share ``ngram`` words in a row with one of the files ``against``."""

    against: tuple[str, ...]
    """Files of an evaluation's texts, in any format that is read; every worker reads them at these paths."""
    use: str = "decontaminate"
    text_field: str = "text"
    ngram: Annotated[int, ValueRange(at_least=1)] = 13
    sha256: tuple[str, ...] = ()
    """Digests of the files, which the plan enters."""

    def __call__(self, document: Document) -> Document | Dropped:
        known = self._known
        shared = any(gram in known for gram in _ngrams(document.text, self.ngram))
        return Dropped("contaminated") if shared else document

    @cached_property
    def _known(self) -> frozenset[int]:
        grams: set[int] = set()
        options = ReadOptions(text_field=self.text_field)
        for name, sha256 in zip(self.against, self.sha256, strict=True):
            path = Path(name)
            if digest_of_file(path) != sha256:
                raise PreparationError(
                    f"{path} changed since the plan was made; plan again, with another --out"
                )
            form = recognize(path)
            for span in spans(path, form, 1 << 40, options):
                for found in documents(path, path.name, form, span, options):
                    if not isinstance(found, Document):
                        raise PreparationError(f"{found}; mend it: it is to be decontaminated against")
                    grams.update(_ngrams(found.text, self.ngram))
        return frozenset(grams)


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises ``PreparationError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PreparationError(f"cannot read {path}: {error.strerror}; correct step.against") from error


def _ngrams(text: str, n: int) -> Iterator[int]:
    for gram in words_of(text.lower(), _WORD).ngrams(n):
        yield xxhash.xxh3_64_intdigest(" ".join(gram).encode())


# Steps that are functions of the user's own, in a file whose text goes into the plan, so that every worker has the same.


@dataclass(frozen=True)
class GivenFunction:
    """``use = "FILE.py:FUNCTION"``: a function from a ``Document`` to a ``Document`` or ``Dropped``."""

    use: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Given to the function by their names: ``parameters = {least = 3}``."""
    code: str = ""
    """The text of the file, which the plan enters."""

    def __call__(self, document: Document) -> Document | Dropped:
        try:
            result = self._function(document, **self.parameters)
        except Exception as error:
            raise PreparationError(
                f"step {self.use} on document {document.name}: {type(error).__name__}: {error}; mend it and plan again"
            ) from error
        if not isinstance(result, Document | Dropped):
            raise PreparationError(
                f"step {self.use} on document {document.name} gave {type(result).__name__}, not a Document or Dropped; mend it and plan again"
            )
        return result

    @cached_property
    def _function(self) -> Callable[..., object]:
        file, _, name = self.use.rpartition(":")
        scope: dict[str, object] = {"__name__": Path(file).stem, "__file__": file}
        exec(compile(self.code, file, "exec"), scope)
        found = scope.get(name)
        if not callable(found):
            raise PreparationError(
                f"step {self.use}: there is no function {name} in {file}; correct step.use"
            )
        try:
            inspect.signature(found).bind(Document("", ""), **self.parameters)
        except TypeError as error:
            raise PreparationError(
                f"step {self.use}: {name} of a document and step.parameters: {error}; correct one of them"
            ) from error
        return found


def with_code(step: GivenFunction, folder: Path) -> GivenFunction:
    """The step with the text of its file, which lies in ``folder``. Raises ``PreparationError`` if it has no such function."""
    file = folder / step.use.rpartition(":")[0]
    try:
        code = file.read_bytes().decode()
        complete = replace(step, code=code)
        _ = complete._function
    except PreparationError:
        raise
    except OSError as error:
        raise PreparationError(
            f"step {step.use}: cannot read {file}: {error.strerror}; correct step.use"
        ) from error
    except Exception as error:
        raise PreparationError(
            f"step {step.use}: {file} cannot be run: {type(error).__name__}: {error}; mend it"
        ) from error
    return complete


AnyStep: TypeAlias = (
    Length
    | Characters
    | GopherQuality
    | GopherRepetition
    | C4
    | Mask
    | Decontaminate
    | DatatroveFilter
    | GivenFunction
)
STEPS: Mapping[str, type[AnyStep]] = MappingProxyType(
    {
        "length": Length,
        "characters": Characters,
        "gopher_quality": GopherQuality,
        "gopher_repetition": GopherRepetition,
        "c4": C4,
        "mask": Mask,
        "decontaminate": Decontaminate,
    }
)


_OTHERS = ("FILE.py:FUNCTION", f"{PREFIX}FILTER")


def read_steps(tables: object, problems: list[Problem]) -> tuple[AnyStep, ...]:
    """The steps that the tables ``[[step]]`` describe; mistakes are added to ``problems``."""
    if not isinstance(tables, list | tuple):
        problems.append(Problem("step", "is no list of tables", "write [[step]]"))
        return ()
    return tuple(
        step for number, table in enumerate(tables) if (step := _read(table, f"step[{number}]", problems))
    )


def _read(table: object, where: str, problems: list[Problem]) -> AnyStep | None:
    use = table.get("use") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(use, str):
        problems.append(Problem(f"{where}.use", "is missing", f"one of {', '.join([*STEPS, *_OTHERS])}"))
        return None
    if re.fullmatch(r".+\.py:\w+", use):
        return _with_parameters(GivenFunction, table, problems, where)
    if use.startswith(PREFIX):
        return _with_parameters(DatatroveFilter, table, problems, where)
    if use not in STEPS:
        problems.append(unknown_value(f"{where}.use", use, [*STEPS, *_OTHERS]))
        return None
    step = read_section(STEPS[use], table, problems, where)
    if isinstance(step, Characters):
        try:
            re.compile(step.allowed)
        except re.error as error:
            problems.append(
                Problem(f"{where}.allowed", f"is no class of characters: {error}", "such as [a-z ]")
            )
    return step


def _with_parameters(
    kind: type[GivenFunction] | type[DatatroveFilter],
    table: Mapping[str, object],
    problems: list[Problem],
    where: str,
) -> AnyStep | None:
    """The step that ``table`` describes, whose ``parameters`` are its own business."""
    given = table.get("parameters", {})
    step = read_section(
        kind, {name: value for name, value in table.items() if name != "parameters"}, problems, where
    )
    try:
        if not isinstance(given, Mapping):
            raise TypeError("is no table")
        parameters = json.loads(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError) as error:
        remedy = 'write parameters = {name = "value"}, with texts, numbers, true and false, lists and tables'
        problems.append(Problem(f"{where}.parameters", str(error), remedy))
        return None
    return None if step is None else replace(step, parameters=parameters)


def resolved(step: AnyStep, folder: Path) -> AnyStep:
    """The step with all that decides what it does; its files lie in ``folder``. Raises ``PreparationError``."""
    if isinstance(step, DatatroveFilter):
        return with_version(step)
    if isinstance(step, GivenFunction):
        return with_code(step, folder)
    if isinstance(step, Decontaminate):
        paths = tuple(str((folder / name).resolve()) for name in step.against)
        return replace(step, against=paths, sha256=tuple(digest_of_file(Path(path)) for path in paths))
    return step

"""Steps by the name in a recipe's ``use``: rules, decontamination, user functions, and filters of datatrove."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import re
import traceback
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
from phalanx.data.steps.step import (
    C4,
    Characters,
    Dropped,
    GopherQuality,
    GopherRepetition,
    Length,
    Mask,
    words_of,
)
from phalanx.run.fields import Problem, ValueRange, read_section, unknown_value

# Steps that are filters of datatrove, by name: ``use = "datatrove:GopherQualityFilter"``.
#
# datatrove (https://github.com/huggingface/datatrove) is Hugging Face's software for the preparation of FineWeb. Only its
# filters are used. Like a step, a filter sees one document at a time. Its parameters are those of its constructor. The plan
# records the installed version, and workers with another version refuse the plan. Many filters split words with spaCy, and some
# download a model at first use.

PREFIX = "datatrove:"


@dataclass(frozen=True)
class DatatroveFilter:
    """``use = "datatrove:NAME"``: drops the documents that the filter drops, and keeps its changes to the text."""

    use: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the filter's constructor: ``parameters = {min_doc_words = 30}``."""
    version: str = ""
    """Version of datatrove, set by the plan."""

    def __call__(self, document: Document) -> Document | Dropped:
        """Run the filter on a copy: return its text, or ``Dropped`` with the filter's reason; raises ``PreparationError``."""
        copy = self._document(text=document.text, id=document.name, metadata={})
        try:
            result = self._filter.filter(copy)
        except Exception as error:
            raise PreparationError(
                f"step {self.use} on document {document.name}: {type(error).__name__}: {error}"
            ) from error
        result, reason = result if isinstance(result, tuple) else (result, "")
        if not result:
            return Dropped(f"{self.use.removeprefix(PREFIX)}{f': {reason}' if reason else ''}")
        return Document(document.name, copy.text)

    @cached_property
    def _document(self) -> Any:
        return importlib.import_module("datatrove.data").Document

    @cached_property
    def _filter(self) -> Any:
        """Datatrove's filter, constructed with the step's parameters. Raises ``PreparationError`` for another version
        than planned, an unknown filter or wrong parameters.
        """
        installed = _installed(self.use)
        if self.version not in ("", installed):
            raise PreparationError(
                f"step {self.use}: the plan was made with datatrove {self.version}, and {installed} is installed here; install that version"
            )
        filters = importlib.import_module("datatrove.pipeline.filters")
        name = self.use.removeprefix(PREFIX)
        kind = getattr(filters, name, None)
        if not inspect.isclass(kind):
            filter_names = ", ".join(sorted(name for name in dir(filters) if name.endswith("Filter")))
            raise PreparationError(
                f"step {self.use}: datatrove {installed} has no filter {name}; it has: {filter_names}"
            )
        try:
            return kind(**self.parameters)
        except (TypeError, ImportError, ValueError) as error:
            raise PreparationError(f"step {self.use}: {error}") from error


def with_version(step: DatatroveFilter) -> DatatroveFilter:
    """Return the step with the installed version. Raises ``PreparationError`` if it cannot be used here."""
    complete = replace(step, version=_installed(step.use))
    _ = complete._filter
    return complete


def _installed(use: str) -> str:
    """Return datatrove's version. Raises ``PreparationError`` if it is missing."""
    try:
        return importlib.metadata.version("datatrove")
    except importlib.metadata.PackageNotFoundError as error:
        raise PreparationError(
            f"step {use} needs the package datatrove: pip install 'phalanx-train[datatrove]', or pip install 'datatrove[processing]' spacy"
        ) from error


# Decontamination: documents that share an n-gram of words with files of an evaluation are dropped.
#
# As in Brown et al., "Language Models are Few-Shot Learners" (arXiv 2005.14165, appendix C), n is 13, and words are compared in
# lower case with only letters and digits. Text without spaces is compared by the number of letters that 13 words have
# (``phalanx.data.steps.step``). The files' n-grams are stored as 64-bit hashes. A comparison with one of them gives a false
# match, which drops a document, with probability 2^-64.

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Decontaminate:
    """Drops documents that share ``ngram`` consecutive words with one of the files ``against``."""

    against: tuple[str, ...]
    """Files with an evaluation's texts in any supported format. Every worker reads them at these paths."""
    use: str = "decontaminate"
    text_field: str = "text"
    ngram: Annotated[int, ValueRange(at_least=1)] = 13
    sha256: tuple[str, ...] = ()
    """Digests of the files, set by the plan."""

    def __call__(self, document: Document) -> Document | Dropped:
        """Drop a document that shares an n-gram with the evaluation files."""
        ngrams = self._evaluation_ngrams
        shared = any(gram in ngrams for gram in _ngrams(document.text, self.ngram))
        return Dropped("contaminated") if shared else document

    @cached_property
    def _evaluation_ngrams(self) -> frozenset[int]:
        """Hashes of all n-grams of the evaluation files, which are read once. Raises ``PreparationError`` if a file
        has changed, has a bad document, or no text of ``ngram`` words.
        """
        grams: set[int] = set()
        options = ReadOptions(text_field=self.text_field)
        for name, sha256 in zip(self.against, self.sha256, strict=True):
            path = Path(name)
            if digest_of_file(path) != sha256:
                raise PreparationError(
                    f"{path} changed since the plan was made; plan again, with another --out"
                )
            form, of_file = recognize(path), set[int]()
            for span in spans(path, form, 1 << 40, options):
                for document in documents(path, path.name, form, span, options):
                    if not isinstance(document, Document):
                        raise PreparationError(f"{document}; mend it: it is to be decontaminated against")
                    of_file.update(_ngrams(document.text, self.ngram))
            if not of_file:
                raise PreparationError(
                    f"{path}: no text has {self.ngram} words, so nothing would be decontaminated against it; lower step.ngram and plan again"
                )
            grams |= of_file
        return frozenset(grams)


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ``PreparationError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PreparationError(f"cannot read {path}: {error.strerror}; correct step.against") from error


def _ngrams(text: str, n: int) -> Iterator[int]:
    """Yield the hash of each n-gram of words, in lower case."""
    for gram in words_of(text.lower(), _WORD).ngrams(n):
        yield xxhash.xxh3_64_intdigest(" ".join(gram).encode())


# Steps that are user functions. The plan includes the text of their file, so that all workers use the same code.


@dataclass(frozen=True)
class UserFunction:
    """``use = "FILE.py:FUNCTION"``: a function from a ``Document`` to a ``Document`` or ``Dropped``."""

    use: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: ``parameters = {least = 3}``."""
    code: str = ""
    """Text of the file, set by the plan."""

    def __call__(self, document: Document) -> Document | Dropped:
        """Return the function's result. Raises ``PreparationError`` if it raises or returns another type."""
        try:
            result = self._function(document, **self.parameters)
        except (Exception, SystemExit) as error:
            raise PreparationError(
                f"step {self.use} on document {document.name}: {self._described(error)}; mend it and plan again"
            ) from error
        if not isinstance(result, Document | Dropped):
            raise PreparationError(
                f"step {self.use} on document {document.name} gave {type(result).__name__}, not a Document or Dropped; mend it and plan again"
            )
        return result

    def _described(self, error: BaseException) -> str:
        """Return type and text of an error that the file's code raised, with its innermost line in the file."""
        file = self.use.rpartition(":")[0]
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
        ]
        return f"{type(error).__name__}: {error}" + (f" ({file}, line {lines[-1]})" if lines else "")

    @cached_property
    def _function(self) -> Callable[..., object]:
        """Return the function that the stored code defines, after running the code; its own errors are raised as they are.

        Raises ``PreparationError`` if there is no such function or it does not take a document and the parameters.
        """
        file, _, name = self.use.rpartition(":")
        scope: dict[str, object] = {"__name__": Path(file).stem, "__file__": file}
        exec(compile(self.code, file, "exec"), scope)
        function = scope.get(name)
        if not callable(function):
            raise PreparationError(
                f"step {self.use}: there is no function {name} in {file}; correct step.use"
            )
        try:
            inspect.signature(function).bind(Document("", ""), **self.parameters)
        except TypeError as error:
            raise PreparationError(
                f"step {self.use}: {name} of a document and step.parameters: {error}; correct one of them"
            ) from error
        return function


def with_code(step: UserFunction, folder: Path) -> UserFunction:
    """Return the step with the text of its file in ``folder``.

    Runs the file's code to check it. Raises ``PreparationError`` if it cannot be read or run, or has no such
    function.
    """
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
    except (Exception, SystemExit) as error:
        raise PreparationError(
            f"step {step.use}: {file} cannot be run: {step._described(error)}; mend it"
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
    | UserFunction
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
    """Return the steps that the tables ``[[step]]`` describe; mistakes are added to ``problems``.

    Steps that cannot be read are left out. Without new ``problems``, the steps are complete.
    """
    if not isinstance(tables, list | tuple):
        problems.append(Problem("step", "is no list of tables", "write [[step]]"))
        return ()
    return tuple(
        step for number, table in enumerate(tables) if (step := _read(table, f"step[{number}]", problems))
    )


def _read(table: object, path: str, problems: list[Problem]) -> AnyStep | None:
    """Return the step that ``table`` describes, by its ``use``. Mistakes are added to ``problems`` under ``path``.

    Returns ``None`` if it cannot be read. A step whose ``allowed`` is no class of characters is returned, with a
    problem.
    """
    use = table.get("use") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(use, str):
        problems.append(Problem(f"{path}.use", "is missing", f"one of {', '.join([*STEPS, *_OTHERS])}"))
        return None
    if re.fullmatch(r".+\.py:\w+", use):
        return _with_parameters(UserFunction, table, problems, path)
    if use.startswith(PREFIX):
        return _with_parameters(DatatroveFilter, table, problems, path)
    if use not in STEPS:
        problems.append(unknown_value(f"{path}.use", use, [*STEPS, *_OTHERS]))
        return None
    step = read_section(STEPS[use], table, problems, path)
    if isinstance(step, Characters):
        try:
            re.compile(step.allowed)
        except re.error as error:
            problems.append(
                Problem(f"{path}.allowed", f"is no class of characters: {error}", "such as [a-z ]")
            )
    return step


def _with_parameters(
    kind: type[UserFunction] | type[DatatroveFilter],
    table: Mapping[str, object],
    problems: list[Problem],
    path: str,
) -> AnyStep | None:
    """Return the step that ``table`` describes.

    Its ``parameters`` must be plain JSON values; their names are checked later. ``None``, with a problem added, if they
    are not or another field is wrong.
    """
    raw = table.get("parameters", {})
    step = read_section(
        kind, {name: value for name, value in table.items() if name != "parameters"}, problems, path
    )
    try:
        if not isinstance(raw, Mapping):
            raise TypeError("is no table")
        parameters = json.loads(json.dumps(dict(raw), allow_nan=False))
    except (TypeError, ValueError) as error:
        remedy = 'write parameters = {name = "value"}, with texts, numbers, true and false, lists and tables'
        problems.append(Problem(f"{path}.parameters", str(error), remedy))
        return None
    return None if step is None else replace(step, parameters=parameters)


def resolved(step: AnyStep, folder: Path) -> AnyStep:
    """Return the step with all inputs that determine its result: a filter's version, the text of a function's file, or
    absolute paths and checksums of evaluation files.

    A function's file is run, as a check. Other steps are unchanged. Files are relative to ``folder``. Raises
    ``PreparationError``.
    """
    if isinstance(step, DatatroveFilter):
        return with_version(step)
    if isinstance(step, UserFunction):
        return with_code(step, folder)
    if isinstance(step, Decontaminate):
        paths = tuple(str((folder / name).resolve()) for name in step.against)
        return replace(step, against=paths, sha256=tuple(digest_of_file(Path(path)) for path in paths))
    return step

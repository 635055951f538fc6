"""Steps that are filters of datatrove, by their names: ``use = "datatrove:GopherQualityFilter"``.

The filters of Hugging Face's preparation of FineWeb (https://github.com/huggingface/datatrove); of its pipelines nothing else is used. A filter sees one document at a
time, as a step does. Its parameters are those of its constructor; the version that is installed where the plan is made belongs to the plan, and a worker with another
one refuses it. Many filters split words by spaCy, and some fetch a model the first time that they are used: datatrove says what it needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from phalanx.data.errors import PreparationError
from phalanx.data.formats.document import Document
from phalanx.data.steps.step import Dropped

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

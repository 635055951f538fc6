"""The documents of a portion after their steps, and why the others were dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.errors import PreparationError
from phalanx.data.formats.document import Document
from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.portions.work.read_portion import read_portion
from phalanx.data.steps.step import Dropped, through_steps


@dataclass(frozen=True)
class KeptDocument(Document):
    """A document of a portion."""

    piece: int
    """Number of the piece of the portion that it was read from."""


def stepped_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that its steps keep, in order. What was read and dropped is counted in ``manifest``, by reason."""
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts["documents read"] = 0
    for piece, document in read_portion(place.plan, number):
        counts["documents read"] += 1
        found = Dropped("bad") if document is None else through_steps(document, place.plan.recipe.step)
        if isinstance(found, Document) and not found.text:
            found = Dropped("empty")
        if isinstance(found, Document):
            _require_characters(found)
            yield KeptDocument(found.name, found.text, piece)
        else:
            counts[f"dropped: {found.reason}"] = counts.get(f"dropped: {found.reason}", 0) + 1


def _require_characters(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise PreparationError(
            f"document {document.name} cannot be written as UTF-8 after its steps: {error}"
        ) from error

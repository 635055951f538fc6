"""The documents of a portion that are to be trained on, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.data.formats.document import Document
from phalanx.data.portions.read_portion import read_portion
from phalanx.data.portions.tasks import TaskManifest, Workplace


@dataclass(frozen=True)
class KeptDocument:
    """A document, and the number of the piece of its portion that it was read from."""

    piece: int
    name: str
    text: str


def kept_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that are kept, in order. What was read and dropped is counted in ``manifest``, by reason."""
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts["documents read"] = 0
    for piece, document in read_portion(place.plan, number):
        counts["documents read"] += 1
        reason = _reason_to_drop(document)
        if document is not None and reason is None:
            yield KeptDocument(piece, document.name, document.text)
        elif reason is not None:
            counts[f"dropped: {reason}"] = counts.get(f"dropped: {reason}", 0) + 1


def _reason_to_drop(document: Document | None) -> str | None:
    if document is None:
        return "bad"
    return None if document.text else "empty"

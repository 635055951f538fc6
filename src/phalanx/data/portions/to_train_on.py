"""The documents of a portion that become tokens: after its steps, and without the copies that were found."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.data.portions.find_duplicates import without_duplicates
from phalanx.data.portions.kept import KeptDocument, stepped_documents
from phalanx.data.portions.tasks import TaskManifest, Workplace


def kept_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that are kept, in order. What was read and dropped is counted in ``manifest``, by reason."""
    if place.plan.recipe.dedup is not None:
        return without_duplicates(place, number, manifest)
    return stepped_documents(place, number, manifest)

"""The documents of a portion that become tokens, after its steps and without the copies that were found, and the split of each."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.portions.work.find_duplicates import without_duplicates
from phalanx.data.portions.work.kept import KeptDocument, stepped_documents


def kept_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that are kept, in order. What was read and dropped is counted in ``manifest``, by reason."""
    if place.plan.recipe.dedup is not None:
        return without_duplicates(place, number, manifest)
    return stepped_documents(place, number, manifest)


def split_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[tuple[str, KeptDocument]]:
    """(split, document) of what is kept of a portion, in order."""
    rule = place.plan.split_rule
    for ordinal, document in enumerate(kept_documents(place, number, manifest)):
        yield from rule.divide(document, number, ordinal)

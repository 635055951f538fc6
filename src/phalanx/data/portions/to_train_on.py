"""The documents of a portion that become tokens, after its steps and without the copies that were found, and the split of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.portions.work.find_duplicates import without_duplicates
from phalanx.data.portions.work.kept import KeptDocument, stepped_documents
from phalanx.data.preparing.prepare import cut_end, decisive_part, split_of
from phalanx.data.stored.index import HELD_OUT, TRAIN


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
    """(split, document) of what is kept of a portion, in order: by a hash of each, but for the one whose end is held out."""
    output, end = place.plan.recipe.output, place.plan.held_out_end
    for ordinal, document in enumerate(kept_documents(place, number, manifest)):
        if end is None or (end.portion, end.document) != (number, ordinal):
            decisive = decisive_part(document.name, document.text, output.hold_out_by)
            yield split_of(decisive, output.held_out), document
        elif not end.characters:
            yield TRAIN if end.to_train_on else HELD_OUT, document
        else:
            begin, rest = cut_end(document.text, end.characters)
            yield TRAIN, replace(document, text=begin)
            yield HELD_OUT, replace(document, text=rest)

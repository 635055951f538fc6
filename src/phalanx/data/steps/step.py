"""What a step is: a pure function from a document to a document, or to the reason why it is dropped.

A step sees one document at a time and nothing else, so that it does not matter where and in which order documents are prepared. A function
of the user's own is one too: ``use = "filters.py:clean"``, with ``from phalanx.data.steps.step import Document, Dropped`` in that file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.data.formats.document import Document

__all__ = ["Document", "Dropped", "Step", "through_steps"]


@dataclass(frozen=True)
class Dropped:
    """A document that is left out. Counted by its reason, so let that be one of a few, without the document's own words or numbers."""

    reason: str


Step = Callable[[Document], Document | Dropped]


def through_steps(document: Document, steps: Sequence[Step]) -> Document | Dropped:
    """The document after all steps, or why the first that dropped it did."""
    for step in steps:
        result = step(document)
        if isinstance(result, Dropped):
            return result
        document = result
    return document

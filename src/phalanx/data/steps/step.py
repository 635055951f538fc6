"""Steps: pure functions from a document to a document, or to the reason why it is dropped.

A step sees only one document, so the place and order of preparation do not matter. A user function can be a step too: ``use =
"filters.py:clean"``, with ``from phalanx.data.steps.step import Document, Dropped`` in that file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.data.formats.document import Document

__all__ = ["Document", "Dropped", "Step", "through_steps"]


@dataclass(frozen=True)
class Dropped:
    """A document that is dropped. It is counted by reason, so use few reasons, without the document's words or numbers."""

    reason: str


Step = Callable[[Document], Document | Dropped]


def through_steps(document: Document, steps: Sequence[Step]) -> Document | Dropped:
    """Return the document after all steps, or the result of the first step that dropped it."""
    for step in steps:
        result = step(document)
        if isinstance(result, Dropped):
            return result
        document = result
    return document

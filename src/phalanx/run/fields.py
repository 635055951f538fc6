"""The small vocabulary with which a run file's fields are declared.

A section of the run file is a frozen dataclass. A field's type says what may be written there, an
``Annotated`` bound says in which range, ``FLEET`` says who owns it, and the string under the field is
its documentation (read back from the source, so that the reference manual and ``phalanx spec`` cannot
drift from the code).

Who owns a field decides what may change between two starts of the same run: fields of the *run* fix the
bits of the weights, fields of the *fleet* (how many ranks, how sharded, how often to save) do not. Between the two stand
fields of the *layout* (how each matrix, sequence or layer is divided): they decide in which order numbers are added.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class ValueRange:
    """The closed or half-open range that a number must lie in."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """True if ``value`` lies in the range (a NaN never does)."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and value == value
        )

    def __str__(self) -> str:
        parts = [
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        ]
        return " and ".join(f"{word} {limit:g}" for word, limit in parts if limit is not None)


@dataclass(frozen=True)
class FleetOwned:
    """Marks a field that may differ from one start of a run to the next without touching its bits."""


@dataclass(frozen=True)
class LayoutOwned:
    """Marks a field that reaches the bits, but under another value of which a run may be continued when asked to.

    Checkpoints load on any layout, so nothing is lost; the weights are then those of this history of layouts.
    """


@dataclass(frozen=True)
class AddedLater:
    """Marks a field that has come since 0.1.0: at its default it is left out of a run's identity, which stays what it was."""


FLEET = FleetOwned()
LAYOUT = LayoutOwned()
LATER = AddedLater()
POSITIVE = ValueRange(at_least=1)
NOT_NEGATIVE = ValueRange(at_least=0)
FRACTION = ValueRange(at_least=0, at_most=1)


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The documentation string under each field of a dataclass, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs

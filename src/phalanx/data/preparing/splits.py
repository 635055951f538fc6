"""The split of each document, by one rule for every preparation.

A hash of a document's name, or of its text, decides, so that the document stays in its split when others are added. If that leaves a split of few documents
empty, the end of the largest document is held out. Conversations are not cut: the last of them moves to the empty split.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from phalanx.data.dedup.exact import normal_form
from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import Document
from phalanx.data.stored.index import HELD_OUT, TRAIN

_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True)
class HeldOutEnd:
    """A document whose end is held out, where a split of so few whole documents would be empty."""

    portion: int
    document: int
    """Its number among the documents with text of the portion."""
    characters: int
    """How many of its last characters are held out; 0 moves it whole to the split that is empty."""
    to_train_on: bool = False
    """With 0 characters: the split that it is moved to is the one to train on."""


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits."""

    held_out: float
    """Share of documents held out."""
    hold_out_by: str = "name"
    """"name", or "text": its normal form, which all copies have."""
    end: HeldOutEnd | None = None
    """``None``: hashes alone decide."""

    def split_of(self, document: Document) -> str:
        """Return the split that the hash of a document names."""
        by_name = self.hold_out_by == "name"
        return split_of(document.name if by_name else normal_form(document.text), self.held_out)

    def divide(self, document: _D, portion: int, number: int) -> Iterator[tuple[str, _D]]:
        """(split, document) of the document ``number`` of a portion: one, or two parts of the document whose end is held out."""
        end = self.end
        if end is None or (end.portion, end.document) != (portion, number):
            yield self.split_of(document), document
        elif not end.characters:
            yield TRAIN if end.to_train_on else HELD_OUT, document
        else:
            begin, rest = cut_end(document.text, end.characters)
            yield TRAIN, replace(document, text=begin)
            yield HELD_OUT, replace(document, text=rest)


def split_of(decisive: str, held_out_fraction: float) -> str:
    """The split, "train" or "held_out", of a document: a hash of ``decisive``, its name or text, decides."""
    place = int.from_bytes(hashlib.sha256(decisive.encode()).digest()[:8], "little") / 2**64
    return HELD_OUT if place < held_out_fraction else TRAIN


def cut_end(text: str, characters: int) -> tuple[str, str]:
    """``text`` in two, the second of about ``characters``: it begins after a line's end or a space if one is near."""
    at = len(text) - characters
    for separator in ("\n", " "):
        after = text.rfind(separator, max(at - characters, 0), at) + 1
        if after > 0:
            return text[:after], text[after:]
    return text[:at], text[at:]


def held_out_end(
    documents: Iterable[tuple[int, int, Document]],
    rule: SplitRule,
    files: Sequence[object],
    *,
    divisible: bool,
) -> HeldOutEnd | None:
    """Choose the document whose end is held out; ``None`` if hashes leave no split empty, after which no more ``documents`` are taken.

    Args:
        documents: (portion, number in the portion, document) of each document with text.
        rule: The rule, without an end.
        files: Where the documents come from, for a message.
        divisible: A document may be cut.

    Raises ``CorpusError`` if there is too little text for two splits.
    """
    required = {TRAIN, HELD_OUT} if rule.held_out > 0 else {TRAIN}
    splits: set[str] = set()
    characters, most, count = 0, 0, 0
    largest = last = (0, 0)
    for portion, number, document in documents:
        splits.add(rule.split_of(document))
        if required <= splits:
            return None
        length, last = len(document.text), (portion, number)
        characters, count = characters + length, count + 1
        if length > most:
            most, largest = length, last
    if not divisible:
        if count < 2:
            raise CorpusError(f"there are {count} conversations, and some are to be held out; give more")
        return HeldOutEnd(*last, 0, to_train_on=splits == {HELD_OUT})
    if most < 2:
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        of = f" of {', '.join(map(str, files[:3]))}{more}" if files else ""
        raise CorpusError(
            f"there is too little text in {count} documents{of} to train on some and hold some out; give more"
        )
    return HeldOutEnd(*largest, min(math.ceil(rule.held_out * characters), most // 2))

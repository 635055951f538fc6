"""Words of a text, including scripts without spaces between words: in Chinese, Japanese, Thai, Lao, Khmer and Burmese, each letter is a unit.

Unicode's rules for words (UAX 29) also break such text at letters, because finding words needs a dictionary. To make n-grams of similar length in all
scripts, a letter counts as part of a word: half of one in Chinese and Japanese, and a quarter in the others. All other text is divided at white
space, or by a given pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

_HAN_AND_KANA = "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003fffd"
_SOUTHEAST_ASIAN = "\u0e01-\u0e4e\u0e81-\u0ece\u1000-\u103f\u1050-\u108f\u1780-\u17d3\uaa60-\uaa7f"
_LETTER = re.compile(f"[{_HAN_AND_KANA}{_SOUTHEAST_ASIAN}]")
_HAN_OR_KANA = re.compile(f"[{_HAN_AND_KANA}]")
_LETTERS_OF_A_WORD = 2, 4
"""Letters per word in Chinese and Japanese, and in the others. Chinese words have 1.6 letters on average, Thai words about four."""


def is_spaceless(text: str) -> bool:
    """Return True if ``text`` has a letter of a script without spaces."""
    return _LETTER.search(text) is not None


@dataclass(frozen=True)
class Words:
    """The words of a text, in order."""

    units: Sequence[str]
    """Words, or single letters of scripts without spaces."""
    ends: Sequence[float] | None = None
    """Number of words before each unit, and the total; ``None`` if every unit is a word."""

    @property
    def count(self) -> float:
        """The number of words, estimated from letters in scripts without spaces."""
        return len(self.units) if self.ends is None else self.ends[-1]

    def ngrams(self, n: int) -> Iterator[tuple[str, ...]]:
        """Return the n-grams of words."""
        return (tuple(self.units[start:stop]) for start, stop in self.spans(n))

    def spans(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of the n-grams: from each unit, the shortest range of at least ``n`` words."""
        if self.ends is None:
            yield from zip(range(len(self.units)), range(n, len(self.units) + 1), strict=False)
            return
        stop = 0
        for start, before in enumerate(self.ends[:-1]):
            while stop < len(self.units) and self.ends[stop] - before < n:
                stop += 1
            if self.ends[stop] - before < n:
                return
            yield start, stop


def words_of(text: str, pattern: re.Pattern[str] | None = None) -> Words:
    """Return the words of ``text``: parts between white space, or matches of ``pattern``.

    If the script has no spaces, the units are letters, each a fraction of a word.
    """
    words = text.split() if pattern is None else pattern.findall(text)
    if not is_spaceless(text):
        return Words(words)
    units = [unit for word in words for unit in _units(word)]
    return Words(units, [0.0, *accumulate(map(_share, units))])


def _units(word: str) -> Iterator[str]:
    """Yield the letters of scripts without spaces one by one, and what is between them."""
    start = 0
    for letter in _LETTER.finditer(word):
        if start < letter.start():
            yield word[start : letter.start()]
        yield letter[0]
        start = letter.end()
    if start < len(word):
        yield word[start:]


def _share(unit: str) -> float:
    """Return the unit's fraction of a word."""
    if len(unit) > 1 or not _LETTER.match(unit):
        return 1.0
    return 1 / _LETTERS_OF_A_WORD[0 if _HAN_OR_KANA.match(unit) else 1]

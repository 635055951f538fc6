"""Words of a text, also where none has spaces between them: in Chinese, Japanese, Thai, Lao, Khmer and Burmese each letter is a unit.

Unicode's rules for words (UAX 29) break such text at letters too: only a dictionary knows the words. So that an n-gram of words is about
as long in each of them, a letter counts as a part of a word: two of Chinese or Japanese make one, and four of the others. All other text is divided at
white space as ever, or by the pattern that is given.
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
"""Letters of a word of Chinese and Japanese, and of the others; words of Chinese have 1.6 letters on average, of Thai some four."""


def is_spaceless(text: str) -> bool:
    """Return True if a letter of a script without spaces is in ``text``."""
    return _LETTER.search(text) is not None


@dataclass(frozen=True)
class Words:
    """The words of a text, in order."""

    units: Sequence[str]
    """Words, or single letters of scripts without spaces."""
    ends: Sequence[float] | None = None
    """Number of words before each unit, and in all; ``None`` if every unit is a word."""

    @property
    def count(self) -> float:
        """The number of words, estimated by letters where there are no spaces."""
        return len(self.units) if self.ends is None else self.ends[-1]

    def ngrams(self, n: int) -> Iterator[tuple[str, ...]]:
        """The n-grams of words."""
        return (tuple(self.units[start:stop]) for start, stop in self.spans(n))

    def spans(self, n: int) -> Iterator[tuple[int, int]]:
        """Begin and end of the n-grams: from each unit on, the shortest piece that has ``n`` words."""
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
    """The words of ``text``: what is between white space, or what ``pattern`` matches."""
    words = text.split() if pattern is None else pattern.findall(text)
    if not is_spaceless(text):
        return Words(words)
    units = [unit for word in words for unit in _units(word)]
    return Words(units, [0.0, *accumulate(map(_share, units))])


def _units(word: str) -> Iterator[str]:
    start = 0
    for letter in _LETTER.finditer(word):
        if start < letter.start():
            yield word[start : letter.start()]
        yield letter[0]
        start = letter.end()
    if start < len(word):
        yield word[start:]


def _share(unit: str) -> float:
    """The part of a word that a unit is."""
    if len(unit) > 1 or not _LETTER.match(unit):
        return 1.0
    return 1 / _LETTERS_OF_A_WORD[0 if _HAN_OR_KANA.match(unit) else 1]

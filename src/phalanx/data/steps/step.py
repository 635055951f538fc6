"""Steps: pure functions from a document to a document, or to the reason why it is dropped; the words of a text, and the rules on them.

A step sees only one document, so the place and order of preparation do not matter. A user function can be a step too: ``use =
"filters.py:clean"``, with ``from phalanx.data.steps.step import Document, Dropped`` in that file.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from phalanx.data.formats.document import Document as Document
from phalanx.run.fields import ValueRange


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


# Words of a text, including scripts without spaces between words: in Chinese, Japanese, Thai, Lao, Khmer and Burmese, each
# letter is a unit.
#
# Unicode's rules for words (UAX 29) also break such text at letters, because finding words needs a dictionary. To make n-grams
# of similar length in all scripts, a letter counts as part of a word: half of one in Chinese and Japanese, and a quarter in the
# others. All other text is divided at white space, or by a given pattern.


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
        """Yield start and end of the n-grams, as indices of ``units``: from each unit, the shortest range of at least ``n`` words."""
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

    In a script without spaces, the units are letters and the parts between them, each counted as a fraction of a
    word.
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


# Rules that depend only on a document's text: length, characters, quality and repetition, and masks for addresses.
#
# The thresholds of ``gopher_quality`` and ``gopher_repetition`` are from Rae et al., "Scaling Language Models: Methods,
# Analysis & Insights from Training Gopher" (arXiv 2112.11446, section A.1.1 and table A1). Those of ``c4`` are from Raffel et
# al., "Exploring the Limits of Transfer Learning" (arXiv 1910.10683, section 2.2), without its list of bad words and its
# removal of repeated spans.


_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_LETTER_OF_ANY_SCRIPT = re.compile(r"[^\W\d_]")
# Indexed by whether the text has letters of a script without spaces between words.
_LINE_ENDS = (".", "!", "?", '"'), (".", "!", "?", '"', "。", "！", "？", "」", "』", "”", "។", "။")
_SENTENCE_ENDS = re.compile(r"[.!?]+(?:\s|$)"), re.compile(r"[.!?]+(?:\s|$)|[。！？។။]+")
_EMAIL = re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
_Share = Annotated[float, ValueRange(at_least=0, at_most=1)]
_Count = Annotated[int, ValueRange(at_least=0)]


@dataclass(frozen=True)
class Length:
    """Drops documents with too few or too many characters or words; 0 is no limit."""

    use: str = "length"
    min_characters: _Count = 0
    max_characters: _Count = 0
    min_words: _Count = 0
    max_words: _Count = 0

    def __call__(self, document: Document) -> Document | Dropped:
        """Drop a document that is too short or too long in characters or words; a limit of 0 does not apply."""
        characters = len(document.text)
        words = words_of(document.text).count if self.min_words or self.max_words else 0
        if characters < self.min_characters or words < self.min_words:
            return Dropped("too short")
        if characters > self.max_characters > 0 or words > self.max_words > 0:
            return Dropped("too long")
        return document


@dataclass(frozen=True)
class Characters:
    """Drops documents whose share of allowed characters is too small."""

    use: str = "characters"
    allowed: str = r"[\w\s.,;:!?'\"()\-]"
    """A character class in the syntax of Python's ``re``."""
    least_share: _Share = 0.9

    def __call__(self, document: Document) -> Document | Dropped:
        """Drop a document with too small a share of allowed characters."""
        allowed_count = sum(1 for _ in re.finditer(self.allowed, document.text))
        return document if allowed_count >= self.least_share * len(document.text) else Dropped("characters")


@dataclass(frozen=True)
class GopherQuality:
    """Drops text that is not prose, by words, symbols, bullets, ellipses, letters and stop words."""

    use: str = "gopher_quality"
    min_words: _Count = 50
    max_words: _Count = 100_000
    stop_words: _Count = 2
    """Minimum number of different words among eight common English words; 0 for other languages."""

    def __call__(self, document: Document) -> Document | Dropped:
        """Return the document, or ``Dropped`` for the first quality rule of Gopher that it violates
        (arXiv:2112.11446, table A1); the reason names the rule.
        """
        text_words = words_of(document.text)
        words, count = text_words.units, text_words.count
        if not self.min_words <= count <= self.max_words:
            return Dropped("gopher: number of words")
        # The lengths of words are meaningless if most have no spaces between them.
        if count > 0.75 * len(words) and not 3 <= sum(map(len, words)) / max(1, len(words)) <= 10:
            return Dropped("gopher: mean length of words")
        symbols = max(document.text.count("#"), document.text.count("...") + document.text.count("…"))
        if symbols > 0.1 * count:
            return Dropped("gopher: symbols")
        lines = document.text.splitlines()
        if sum(line.lstrip().startswith(("•", "-", "*")) for line in lines) > 0.9 * len(lines):
            return Dropped("gopher: bullets")
        if sum(line.rstrip().endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
            return Dropped("gopher: ellipses")
        if sum(1 for word in words if _LETTER_OF_ANY_SCRIPT.search(word)) < 0.8 * len(words):
            return Dropped("gopher: words without letters")
        if len(_STOP_WORDS & {word.lower() for word in words}) < self.stop_words:
            return Dropped("gopher: stop words")
        return document


@dataclass(frozen=True)
class GopherRepetition:
    """Drops documents with too much repetition of lines, paragraphs or n-grams of words."""

    use: str = "gopher_repetition"

    def __call__(self, document: Document) -> Document | Dropped:
        """Drop a document with too large a share of repeated lines, paragraphs, one frequent n-gram, or repeated
        n-grams, by Gopher's limits (arXiv:2112.11446, table A1). The reason names the rule.
        """
        text = document.text
        for unit, parts in (("lines", text.splitlines()), ("paragraphs", re.split(r"\n{2,}", text))):
            parts = [part for part in parts if part.strip()]
            repeated = _repeated(parts)
            if len(repeated) > 0.3 * len(parts) or sum(map(len, repeated)) > 0.2 * len(text):
                return Dropped(f"gopher: repeated {unit}")
        words = words_of(text)
        characters = max(1, sum(map(len, words.units)))
        for n, most in _TOP_NGRAMS:
            counts = Counter(words.ngrams(n))
            if counts:
                top = max(counts.values())
                share = (
                    max(sum(map(len, gram)) for gram, count in counts.items() if count == top)
                    * top
                    / characters
                )
                if top > 1 and share > most:
                    return Dropped(f"gopher: frequent {n}-gram")
        for n, most in _REPEATED_NGRAMS:
            if _characters_in_repeated(words, n) > most * characters:
                return Dropped(f"gopher: repeated {n}-grams")
        return document


@dataclass(frozen=True)
class C4:
    """Keeps only lines that are sentences, and drops documents with too few of them, with braces, or with filler text."""

    use: str = "c4"
    min_sentences: _Count = 5
    min_words_of_line: _Count = 3

    def __call__(self, document: Document) -> Document | Dropped:
        """Keep the lines that end as sentences and are long enough; drop the document if too few sentences are left.

        Documents with "lorem ipsum" or "{" are dropped. Lines that mention javascript, or end with "...", are
        removed.
        """
        if "lorem ipsum" in document.text.lower():  # matched text: the user's documents
            return Dropped("c4: lorem ipsum")
        if "{" in document.text:
            return Dropped("c4: braces")
        spaceless = is_spaceless(document.text)
        sentences = [
            line
            for line in map(str.strip, document.text.splitlines())
            if line.endswith(_LINE_ENDS[spaceless]) and not line.endswith("...")
            if words_of(line).count >= self.min_words_of_line and "javascript" not in line.lower()
        ]
        text = "\n".join(sentences)
        if len(_SENTENCE_ENDS[spaceless].findall(text)) < self.min_sentences:
            return Dropped("c4: sentences")
        return replace(document, text=text)


@dataclass(frozen=True)
class Mask:
    """Replaces e-mail addresses and public IPv4 addresses with reserved ones."""

    use: str = "mask"
    email: str = "email@example.com"
    """Replacement for e-mail addresses; if empty, they are kept."""
    ip: str = "192.0.2.1"
    """Replacement for IP addresses, by default one of RFC 5737; if empty, they are kept."""

    def __call__(self, document: Document) -> Document | Dropped:
        """Return the document with e-mail addresses and public IPv4 addresses replaced by the step's own; an empty
        replacement leaves them. Never drops it.
        """
        text = document.text
        if self.email and "@" in text:
            text = _EMAIL.sub(lambda _: self.email, text)
        if self.ip:
            text = _IPV4.sub(lambda match: self.ip if _is_public(match[0]) else match[0], text)
        return document if text == document.text else replace(document, text=text)


def _is_public(address: str) -> bool:
    """Return True for an IP address that is globally reachable; False for others, and for text that is no address."""
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _repeated(parts: Sequence[str]) -> list[str]:
    """Return the parts that are equal to an earlier one, with repetition."""
    earlier: set[str] = set()
    repeated = []
    for part in parts:
        if part in earlier:
            repeated.append(part)
        earlier.add(part)
    return repeated


def _characters_in_repeated(words: Words, n: int) -> int:
    """Return the number of characters in n-grams that occurred before; a word in several of them counts once."""
    earlier: set[tuple[str, ...]] = set()
    characters, counted = 0, 0
    for start, stop in words.spans(n):
        gram = tuple(words.units[start:stop])
        if gram in earlier:
            begin = max(start, counted)
            characters += sum(map(len, words.units[begin:stop]))
            counted = stop
        earlier.add(gram)
    return characters

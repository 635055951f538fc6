"""Token ids as text while they come, although a character may be spread over several tokens.

A token of a byte-level tokenizer is a string of bytes that can end within a character, and decoding it alone would
print U+FFFD where an emoji is on its way. So what could still change is held back until it cannot: what has been
printed plus the flush is exactly what decoding all ids at once gives, for any ids.
"""

from __future__ import annotations

from phalanx.data.tokenizers.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns ids into text one at a time; special tokens give none."""

    def __init__(
        self, tokenizer: Tokenizer, *, at_start: bool = True, known: dict[int, str] | None = None
    ) -> None:
        """``at_start``: the first id begins a text; else the ids go on with one, such as a prompt.

        ``known`` keeps the texts of ids that are whole characters amid a text, and may be shared by all streams of a tokenizer.
        """
        self._tokenizer = tokenizer
        self._at_start = at_start
        self._known = {} if known is None else known
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """The text that is certain after one more id; often the token's own, at times none.

        Raises ValueError for an id outside the tokenizer's vocabulary.
        """
        amid = not self._held and not self._at_start
        if amid and (seen := self._known.get(token)) is not None:
            return seen
        if not 0 <= token < self._tokenizer.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self._tokenizer.vocab_size}")
        if self._tokenizer.byte_lengths[token] == 0:
            return ""
        self._held.append(token)
        text = self._decode(self._held)
        if not text.endswith(_REPLACEMENT):
            if amid:
                self._known[token] = text
            self._held.clear()
            self._at_start = False
            return text
        # A cut that changes nothing lies between characters: what is before it is certain.
        before, last = self._held[:-1], self._held[-1:]
        certain = self._decode(before)
        if not before or certain + self._tokenizer.decode(last, at_start=False) != text:
            return ""
        self._held = last
        self._at_start = False
        return certain

    def flush(self) -> str:
        """The text that is held back; U+FFFD where a character was never finished."""
        text = self._decode(self._held)
        self._held.clear()
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, at_start=self._at_start)

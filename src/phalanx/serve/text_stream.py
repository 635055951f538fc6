"""Token ids as text while they come, although a character may be spread over several tokens.

A token of a byte-level tokenizer is a string of bytes that can end within a character, and decoding it alone would
print U+FFFD where an emoji is on its way. So what could still change is held back until it cannot: what has been
printed plus the flush is exactly what decoding all ids at once gives, for any ids.
"""

from __future__ import annotations

from phalanx.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns ids into text one at a time; special tokens give none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """The text that is certain after one more id; often the token's own, at times none.

        Raises ValueError for an id outside the tokenizer's vocabulary.
        """
        if not 0 <= token < self._tokenizer.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self._tokenizer.vocab_size}")
        if self._tokenizer.byte_lengths[token] == 0:
            return ""
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if not text.endswith(_REPLACEMENT):
            self._held.clear()
            return text
        # A cut that changes nothing lies between characters: what is before it is certain.
        before, last = self._held[:-1], self._held[-1:]
        certain = self._tokenizer.decode(before)
        if certain + self._tokenizer.decode(last) != text:
            return ""
        self._held = last
        return certain

    def flush(self) -> str:
        """The text that is held back; U+FFFD where a character was never finished."""
        text = self._tokenizer.decode(self._held)
        self._held.clear()
        return text

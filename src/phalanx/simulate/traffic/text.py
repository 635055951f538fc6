"""What a simulated model says: each token and its log-probability are functions of the request and the place alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

PAGE_ROWS = 64


def token(prompt: tuple[int, ...], seed: int, index: int) -> int:
    """The token at a place of the text that continues ``prompt``."""
    return _number(prompt[0], len(prompt), prompt[-1], seed, index) % 50_000


def logprob(tokens: Sequence[int], place: int) -> float:
    """The log-probability of a token at a place of a text."""
    return -(_number(place, tokens[0], tokens[place]) % 10_000) / 1024


def page_names(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Chained names of the whole pages of a text."""
    names, before = [], b""
    for start in range(0, len(tokens) - PAGE_ROWS + 1, PAGE_ROWS):
        piece = repr(tuple(tokens[start : start + PAGE_ROWS])).encode()
        before = hashlib.blake2b(before + piece, digest_size=16).digest()
        names.append(before)
    return tuple(names)


def _number(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")

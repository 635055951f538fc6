"""Reads JSON that may have been damaged, or made to break its reader, as values that every later user can take.

Python's own reader takes more than other programs do: whole numbers of any length, which no float and no 64-bit field holds, and halves of
surrogate pairs, which no file, terminal or browser can be sent. A number too long becomes a float here, half a pair a replacement character,
and nesting without end is as wrong as any other damage.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG = 18
"""Whole numbers of so many digits fit into 64 bits, whichever they are."""


def plain_json(content: bytes, *, exact: bool = False) -> Any:
    """The value that the JSON in ``content`` holds; ``exact`` keeps whole numbers of any size. Raises ``ValueError`` if it is none, or too deep."""
    try:
        found = (_EXACT if exact else _DECODER).decode(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _paired(found) if b"\\u" in content and _SURROGATE.search(content) else found


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONG else _bounded(digits)


def _bounded(digits: str) -> int | float:
    number = int(digits)  # of thousands of digits: a ValueError
    return number if -(1 << 63) <= number < 1 << 63 else float(digits)


def _paired(value: Any) -> Any:
    """The value with no half of a surrogate pair in any of its texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_paired(key): _paired(item) for key, item in value.items()}
    return [_paired(item) for item in value] if isinstance(value, list) else value


_DECODER, _EXACT = json.JSONDecoder(parse_int=_whole), json.JSONDecoder()

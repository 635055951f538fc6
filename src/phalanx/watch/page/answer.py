"""Answers of the page: JSON, errors with a text for people, and parameters of a request that are checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response


class RequestError(Exception):
    """The request cannot be answered; ``str`` says why and what would be."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def not_found(what: str) -> RequestError:
    """There is no such thing here."""
    return RequestError(what, 404)


def json_bytes(content: object) -> bytes:
    """The content as JSON; numbers that are not finite become ``null``."""
    try:
        return msgspec.json.encode(content, enc_hook=_plain)
    except (
        UnicodeEncodeError,
        OverflowError,
    ):  # a name on a disk need not be text, nor a number in a file one that is counted
        return msgspec.json.encode(_writable(msgspec.to_builtins(content, enc_hook=_plain)))


def _writable(value: object) -> object:
    """The value with escapes for what no text may hold."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def json_answer(content: object, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(json_bytes(content), status, media_type="application/json")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


class Parameters:
    """The query of a request, and what its path names."""

    def __init__(self, query: Mapping[str, str], path: Mapping[str, str] | None = None) -> None:
        self._query, self.path = query, path or {}

    def text(self, name: str, default: str = "", most: int = 2000) -> str:
        """A text. Raises ``RequestError`` if it is too long."""
        found = self._query.get(name, default)
        if len(found) > most:
            raise RequestError(f"{name} has {len(found)} characters; it may have {most}")
        return found

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of ``choices``, the first if nothing is said."""
        found = self.text(name) or choices[0]
        if found not in choices:
            raise RequestError(f"{name}={found[:100]!r}: there are {', '.join(choices)}")
        return found

    def names(self, name: str, most: int = 64) -> list[str]:
        """A list of names with commas between them."""
        found = [one for one in self.text(name, most=8000).split(",") if one]
        if len(found) > most:
            raise RequestError(f"{name} names {len(found)}; it may name {most}")
        return found

    def number(self, name: str) -> float | None:
        """A finite number; ``None`` if nothing is said."""
        said = self.text(name, most=100)
        if not said:
            return None
        try:
            found = float(said)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise RequestError(f"{name}={said!r} is no number")
        return found

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number within bounds."""
        said = self.text(name, most=100)
        if not said:
            return default
        try:
            found = int(said)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise RequestError(f"{name}={said!r}: give a whole number from {least} to {most}")
        return found

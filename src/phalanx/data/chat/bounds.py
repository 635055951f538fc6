"""Bounds on what a stranger's chat template may spend: lines executed, characters written, sizes of what it multiplies.

Jinja's sandbox keeps a template from Python's internals, but not from two nested loops that run for a day. A trace function, set for the
rendering thread alone, counts the template's lines and ends it. Not bounded is what one expression makes of long texts by ``replace`` or ``join``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2.exceptions
import jinja2.runtime
import jinja2.sandbox

LINES = 2_000_000
"""Lines of a template that are executed for a conversation; a message takes about a hundred."""
CHARACTERS = 32 << 20
_NUMBER = 1 << 20
_TEMPLATE = "<template>"


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, without texts and numbers that grow in a single operation."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The operation, or a SecurityError if its result would be larger than any message."""
        if operator == "+" and not isinstance(left, int | float):
            size = _length(left) + _length(right)
        elif operator == "*":
            size = max(_length(left) * _count(right), _length(right) * _count(left))
        elif operator == "**":
            size = _count(left).bit_length() * _count(right)
        else:
            # Widths and precisions of a format.
            size = CHARACTERS + 1 if operator == "%" and isinstance(left, str) and _long_number(left) else 0
        if size > CHARACTERS or (operator == "*" and max(_count(left), _count(right)) > 1 << 128):
            raise jinja2.exceptions.SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """The call, or a SecurityError if a method of a text is given a width larger than any message."""
        method = getattr(called, "__wrapped__", called)  # the sandbox has put its own around ``format``
        if isinstance(text := getattr(method, "__self__", None), str):
            if any(isinstance(value, int) and abs(value) > _NUMBER for value in (*args, *kwargs.values())):
                raise jinja2.exceptions.SecurityError("a number given to a text's method is too large")
            if method.__name__ in ("format", "format_map") and _long_number(text):
                raise jinja2.exceptions.SecurityError("a width in a format is too large")
        return super().call(context, called, *args, **kwargs)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _long_number(text: str) -> bool:
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 6:
            return True
    return False


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text. Raises SecurityError once they are more than ``CHARACTERS``."""
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > CHARACTERS:
            raise jinja2.exceptions.SecurityError(f"it writes more than {CHARACTERS} characters")
    return "".join(kept)


@contextmanager
def bounded_lines(limit: int = LINES) -> Iterator[None]:
    """Ends a template within, by a SecurityError, after it has executed ``limit`` lines; this thread alone is watched."""
    left = limit

    def inside(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise jinja2.exceptions.SecurityError(f"it does not end within {limit} lines")
        return inside

    def entered(frame: FrameType, _event: str, _argument: object) -> Any:
        return inside if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)

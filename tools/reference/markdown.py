"""Markdown out of docstrings and rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; signs that would end a cell are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in row)} |\n"
        for row in lines
    )


def prose(text: str) -> str:
    """Return a docstring as Markdown: literals in single backticks, lists of arguments and errors as lists."""
    text = text.replace("``", "`")
    text = re.sub(r"^(Args|Raises|Returns):\n", r"\1:\n\n", text, flags=re.MULTILINE)
    return re.sub(r"^    (\w+): (.*(?:\n {8}.*)*)", _item, text, flags=re.MULTILINE).strip() + "\n"


def docstring(value: object) -> str:
    """Return the docstring of a class, function or property as Markdown."""
    return prose(inspect.getdoc(value) or "")


def _item(match: re.Match[str]) -> str:
    return f"- `{match[1]}`: {' '.join(match[2].split())}"

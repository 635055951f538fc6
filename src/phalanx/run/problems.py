"""Mistakes in a file that users write, as values: a path, what was found, what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    path: str
    """Dotted path of the field, such as ``optimizer.lr``; empty for the file as a whole."""
    found: str
    """The finding: what is wrong."""
    remedy: str
    """The remedy: what is allowed, or what to change."""
    also: tuple[str, ...] = ()
    """Other fields that the rule looks at."""

    def __str__(self) -> str:
        return f"{self.path or 'file'}: {self.found} ({self.remedy})"


class RunFileError(ValueError):
    """A run file with everything that is wrong with it."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__(listing(str(path), problems))


def listing(place: str, problems: Sequence[Problem]) -> str:
    """All ``problems`` of the file or table ``place``, a line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{place}: {count}\n" + "\n".join(f"  {problem}" for problem in problems)


def divisors_near(number: int, wanted: int) -> str:
    """The divisors of ``number`` closest to ``wanted``, as text."""
    # Of numbers too large to search, those that a small divisor leads to.
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:4])))

"""Makes one line of the same thing said by many ranks and nodes, with how many said it, who, and when first and last.

Two texts say the same if they differ only in numbers: ranks, ports, addresses, times, identifiers. A fleet of 12,500 nodes that each cannot
reach one server then says one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.observe.logs.line import LogLine

_VARYING = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[a-f]*\d)[0-9a-f]{12,}\b"
    r"|[-+]?\d[\d.,:_]*(?:[eE][-+]?\d+)?"
)


@dataclass
class LogGroup:
    """Lines that say the same."""

    example: LogLine
    """The first of them."""
    count: int = 0
    first: float = float("inf")
    last: float = 0.0
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)

    @property
    def place(self) -> str:
        """Who said it, in words."""
        parts = []
        if self.ranks:
            parts.append(f"rank{'s' if len(self.ranks) > 1 else ''} {ranges(self.ranks)}")
        if self.nodes:
            parts.append(next(iter(self.nodes)) if len(self.nodes) == 1 else f"{len(self.nodes):,} nodes")
        return " on ".join(parts) or self.example.process

    def add(self, line: LogLine) -> None:
        """Counts a line in."""
        self.count += 1
        self.first, self.last = min(self.first, line.t), max(self.last, line.t)
        if line.rank is not None:
            self.ranks.add(line.rank)
        if line.node is not None:
            self.nodes.add(line.node)


def normalized(text: str) -> str:
    """A text without what varies."""
    return _VARYING.sub("#", text)


def grouped(lines: Iterable[LogLine]) -> list[LogGroup]:
    """The lines in groups that say the same at the same level, in the order in which each was first said."""
    groups: dict[tuple[str, str], LogGroup] = {}
    for line in lines:
        key = (line.level, normalized(line.text))
        group = groups.get(key)
        if group is None:
            group = groups[key] = LogGroup(line)
        group.add(line)
    return list(groups.values())


def ranges(numbers: Iterable[int], most: int = 6) -> str:
    """Numbers in words: ``0-7, 9``."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")

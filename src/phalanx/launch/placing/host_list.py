"""Reads and writes Slurm's host lists, such as ``rack[01-12]n[1-4,7],login``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, product

_PART = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")
_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")
MOST_HOSTS = 1_000_000


def expanded(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises ``ValueError`` if it is none, or names more than a million."""
    hosts: list[str] = []
    place = 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None or not match[0]:
            raise ValueError(f"{text!r} is no list of hosts like n[1-4,7]")
        hosts += _hosts(match[0], text)
        place = match.end() + 1
        if match.end() < len(text) and text[match.end()] != ",":
            raise ValueError(f"{text!r} is no list of hosts like n[1-4,7]")
    return hosts


def _hosts(part: str, text: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    # Odd pieces were in brackets.
    choices = [list(_numbers(piece, text)) if k % 2 else [piece] for k, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_HOSTS:
        raise ValueError(f"{text[:80]!r} names {count:,} hosts, more than {MOST_HOSTS:,}")
    yield from map("".join, product(*choices))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for one in ranges.split(","):
        first, dash, last = one.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r}: [{ranges}] is no list of numbers like [1-4,7]")
        span = range(int(first), int(last or first) + 1)
        if not span or len(span) > MOST_HOSTS:
            raise ValueError(f"{text!r}: {one} is no range of at most {MOST_HOSTS:,} numbers")
        yield from (f"{number:0{len(first)}d}" for number in span)


def folded(hosts: Iterable[str]) -> str:
    """A host list of ``hosts``, in their order: neighbors whose last numbers follow each other become a range."""
    found: list[str] = []
    for (head, tail, width), run in groupby(map(_cut, hosts), key=lambda one: (one[0], one[2], one[3])):
        if width < 0:
            found += [head for _ in run]
            continue
        numbers = [number for _, number, _, _ in run]
        ranges = []
        for _, near in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            together = [number for _, number in near]
            first, last = (f"{number:0{width}d}" for number in (together[0], together[-1]))
            ranges.append(first if len(together) == 1 else f"{first}-{last}")
        alone = len(ranges) == 1 and "-" not in ranges[0]
        found.append(f"{head}{ranges[0]}{tail}" if alone else f"{head}[{','.join(ranges)}]{tail}")
    return ",".join(found)


def _cut(host: str) -> tuple[str, int, str, int]:
    """What is before the last number of a name, the number, what is behind, and how wide it is padded (0: not; -1: no number)."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", host)
    if match is None:
        return host, 0, "", -1
    digits = match[2]
    return match[1], int(digits), match[3], len(digits) if digits.startswith("0") and len(digits) > 1 else 0

"""Whose rows a step computes: requests that decode first, then the prompts of others in pieces (chunked prefill, arXiv 2308.16369).

Neither the order nor the size of the pieces changes a bit of any token; they decide who waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Course:
    """How far a running request is; requests are given in the order in which they came."""

    id: str
    computed: int
    """Tokens whose keys and values are held."""
    length: int
    """Tokens of the text so far, more than ``computed``."""
    drafted: int = 0
    """Guesses of the next tokens, which may be computed behind the last one."""


def plan_step(courses: Sequence[Course], rows: int, most: int | None = None) -> list[tuple[str, int]]:
    """The requests that take part in a step, at most ``most``, and how many rows each computes, at most ``rows`` together and none without one."""
    planned: dict[str, int] = {}
    left = rows
    decoding = [course for course in courses if course.length - course.computed == 1]
    prefilling = [course for course in courses if course.length - course.computed > 1]
    if most is not None:
        decoding, prefilling = decoding[:most], prefilling[: max(0, most - len(decoding))]
    # A guess never takes the row of another's next token.
    for course, wanted in (
        *((course, 1) for course in decoding),
        *((course, course.drafted) for course in decoding),
        *((course, course.length - course.computed) for course in prefilling),
    ):
        count = min(left, wanted)
        if count:
            planned[course.id] = planned.get(course.id, 0) + count
        left -= count
    return list(planned.items())


def youngest(courses: Sequence[Course]) -> str:
    """The request that gives its pages up when they run out: the one that came last, so that the oldest always ends."""
    return courses[-1].id

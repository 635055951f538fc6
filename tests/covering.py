"""Pairwise choice of test cases: few cases in which every two choices that can meet do meet.

Most defects of software with many settings show when two of them meet (Kuhn, Wallace and Gallo, "Software fault interactions and implications
for software testing", IEEE TSE 30(6), 2004). The greedy choice is that of Cohen, Dalal, Fredman and Patton, "The AETG system", IEEE TSE 23(7), 1997.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
Choices = Callable[[Case], Iterable[Hashable]]


def covering(cases: Iterable[Case], choices: Choices[Case], cost: Callable[[Case], float]) -> list[Case]:
    """Return few of ``cases`` with every pair of choices that occurs in any of them; the cheapest pairs first."""
    pairs = {case: set(itertools.combinations(choices(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        case = max(pairs, key=lambda case: len(pairs[case] & missing) / cost(case))
        missing -= pairs[case]
        chosen.append(case)
    return chosen


def new_choices_first(
    cases: Iterable[Case], choices: Choices[Case], leave: Collection[Hashable] = ()
) -> list[Any]:
    """Return ``cases`` as parameters of a test; those without a new choice, or with one to ``leave`` to the slow tests, are marked slow."""
    seen: set[Hashable] = set()
    parameters: list[Any] = []
    for case in cases:
        of_case = set(choices(case))
        if of_case - seen and not of_case & set(leave):
            seen |= of_case
            parameters.append(case)
        else:
            parameters.append(pytest.param(case, marks=pytest.mark.slow))
    return parameters

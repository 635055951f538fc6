"""Few cases cover every pair of choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covering import covering, new_choices_first

Case = tuple[int, ...]


def choices(case: Case) -> list[tuple[int, int]]:
    return list(enumerate(case))


def pairs(case: Case) -> set[object]:
    return set(itertools.combinations(choices(case), 2))


@given(st.sets(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40))
def test_every_pair_of_choices_that_occurs_in_any_case_occurs_in_a_chosen_one(cases: set[Case]) -> None:
    chosen = covering(sorted(cases), choices, cost=lambda _: 1)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cases))


def test_few_cases_are_chosen_of_many() -> None:
    cases = list(itertools.product(range(4), repeat=5))
    assert len(covering(cases, choices, cost=lambda _: 1)) <= 32 < len(cases)


def test_the_suite_runs_every_choice_once_and_leaves_pairs_to_the_slow_tests() -> None:
    parameters = new_choices_first([(0, 0), (1, 1), (0, 1), (2, 0)], choices)
    assert parameters[:2] == [(0, 0), (1, 1)]
    assert parameters[2] == pytest.param((0, 1), marks=pytest.mark.slow)
    assert parameters[3] == (2, 0)

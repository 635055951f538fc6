"""Which expert gives way, against the best that could be done."""

from __future__ import annotations

import itertools
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.weights.ring import ExpertFrequency, ExpertName, optimal_hits

TRACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=9)


def best_by_trying(trace: list[ExpertName], capacity: int) -> int:
    @cache
    def best(place: int, held: frozenset[ExpertName]) -> int:
        if place == len(trace):
            return 0
        one = trace[place]
        if one in held:
            return 1 + best(place + 1, held)
        kept = itertools.combinations(held, min(len(held), capacity - 1))
        return max(best(place + 1, frozenset({*some, one})) for some in kept)

    return best(0, frozenset())


@given(TRACES, st.integers(1, 4))
def test_the_optimum_is_that_of_trying_everything(trace: list[ExpertName], capacity: int) -> None:
    assert optimal_hits(trace, capacity) == best_by_trying(trace, capacity)


def test_an_expert_that_was_chosen_often_stays_until_its_uses_have_aged() -> None:
    frequency = ExpertFrequency(4)
    for turn in range(5):
        frequency.use((1, 0), turn)
    frequency.use((1, 1), 5)
    assert frequency.least([(1, 0), (1, 1)], (), 5) == (1, 1)
    for turn in range(50, 53):
        frequency.use((1, 1), turn)
    assert frequency.least([(1, 0), (1, 1)], (), 53) == (1, 0)


def test_of_two_experts_chosen_as_often_the_shallower_stays() -> None:
    frequency = ExpertFrequency(4)
    for name in ((0, 3), (3, 0)):
        frequency.use(name, 0)
    assert frequency.least([(0, 3), (3, 0)], (), 1) == (3, 0)
    assert frequency.least([(0, 3), (3, 0)], {(3, 0)}, 1) == (0, 3)
    assert frequency.least([(3, 0)], {(3, 0)}, 1) is None

"""Places of samples located a stretch at a time: the same places, in any order of requests."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.data.reading.dataset import LocatedAhead


class Counted:
    """Places that differ by the sample's number; ``calls`` counts how often they were computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.calls += 1
        samples = np.arange(first, first + count)
        return samples % 3, samples * 7


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 40), st.integers(1, 5)), max_size=12))
def test_every_sample_has_its_place_in_any_order_of_stretches(
    stretches: list[tuple[int, int, int]],
) -> None:
    located = LocatedAhead(Counted())
    for first, count, times in stretches:
        for number in range(times):  # one after another, as a process that reads alone does
            sources, records = located(first + number * count, count)
            samples = np.arange(first + number * count, first + (number + 1) * count)
            np.testing.assert_array_equal(sources, samples % 3)
            np.testing.assert_array_equal(records, samples * 7)


def test_a_process_that_reads_one_after_another_has_few_stretches_located() -> None:
    places = Counted()
    located = LocatedAhead(places)
    for first in range(0, 4096, 8):
        located(first, 8)
    assert places.calls <= 4


def test_a_rank_that_takes_some_of_each_step_has_just_those_located() -> None:
    places = Counted()
    located = LocatedAhead(places)
    for first in range(0, 64 * 100, 64):
        assert [len(part) for part in located(first, 8)] == [8, 8]
    assert places.calls == 100

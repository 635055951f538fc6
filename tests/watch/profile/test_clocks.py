"""Clocks of ranks are brought together by barriers, and the stated error holds for any delays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx_watch.profile.waits import ClockFit, fitted

DELAYS = st.lists(st.integers(0, 5_000_000), min_size=6, max_size=6)


@given(
    offset_ns=st.integers(-(10**12), 10**12),
    mine=DELAYS,
    theirs=DELAYS,
    leaving=st.lists(st.integers(0, 2_000_000), min_size=12, max_size=12),
)
def test_the_true_offset_lies_within_the_error(
    offset_ns: int, mine: list[int], theirs: list[int], leaving: list[int]
) -> None:
    true_ns, sides = 10**18, []
    for number in range(6):
        came = true_ns + theirs[number], true_ns + mine[number]
        met = max(came)
        left = met + leaving[2 * number], met + leaving[2 * number + 1]
        sides.append((*came, *left))
        true_ns = max(left) + 1000
    table = np.array(sides, np.int64)
    reference = table[:, 0], table[:, 2]
    other = table[:, 1] + offset_ns, table[:, 3] + offset_ns
    fits = fitted({0: (reference, reference), 1: (other, other)})
    assert abs(fits[1].ahead_ns[0] - offset_ns) <= fits[1].error_ns + 1
    assert fits[0].error_ns == 0
    common = fits[1].to_common(other[0])
    assert np.abs(common - table[:, 1]).max() <= fits[1].error_ns + 1


def test_a_clock_that_runs_fast_is_taken_to_do_so_evenly() -> None:
    fit = ClockFit((0.0, 1000.0), (100.0, 200.0), 1.0)
    assert fit.to_common(np.array([0, 500, 1000])).tolist() == [-100, 350, 800]


def test_without_a_barrier_nothing_bounds_the_error() -> None:
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    assert fitted({0: (nothing, nothing), 1: (nothing, nothing)})[1].error_ns == np.inf

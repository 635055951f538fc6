"""The usual deviation, against NumPy, bit for bit: whether a step is a spike belongs to the bits of a run."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.throughput import usual_deviation

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_it_is_1_4826_times_the_median_absolute_deviation_to_the_bit(values: list[float]) -> None:
    middle = float(np.median(values))
    assert usual_deviation(values, middle) == 1.4826 * float(np.median(np.abs(np.array(values) - middle)))

"""The planner's memory against the peaks of PyTorch's allocator, in layouts that the planner was not improved with."""

from __future__ import annotations

import statistics

from null_gpu.memory import JUDGING, measured


def test_predicted_memory_is_within_a_tenth_of_the_allocators_peak_and_within_three_percent_in_the_median() -> (
    None
):
    measurements = {name: measured(name) for name in JUDGING}
    errors = {
        name: abs(measurement.predicted / measurement.allocated - 1)
        for name, measurement in measurements.items()
    }
    assert max(errors.values()) < 0.1, errors
    assert statistics.median(errors.values()) < 0.03, errors

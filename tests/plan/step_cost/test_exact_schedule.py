"""Schedules with unequal stages, against closed forms that hold for them, and against what cannot be otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx_plan.step_cost.pipeline import StageTimes, flush_s, timeline

_SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


def uneven(stages: int, seed: int, layouts: int = 1) -> StageTimes:
    """Stages of random lengths."""
    generator = np.random.default_rng(seed)
    return StageTimes(*(generator.uniform(0.5, 1.5, (layouts, stages)) for _ in range(3)))


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 1000))
def test_gpipe_takes_the_slowest_stage_for_every_micro_batch_but_one(
    ranks: int, batches: int, seed: int
) -> None:
    times = uneven(ranks, seed)
    backward = times.input_gradient_s + times.weight_gradient_s
    # A flow shop with equal jobs: the sum of all stages once, the slowest for each further job.
    expected = sum(part.sum() + (batches - 1) * part.max() for part in (times.forward_s, backward))
    assert flush_s("gpipe", ranks, 1, batches, times, np.zeros(1)) == pytest.approx(expected)


@given(st.integers(2, 5), st.integers(0, 1000))
def test_long_1f1b_takes_the_slowest_rank_for_every_micro_batch(ranks: int, seed: int) -> None:
    times, batches = uneven(ranks, seed), 200
    rank_s = times.forward_s + times.input_gradient_s + times.weight_gradient_s
    expected = (batches - 1) * rank_s.max() + rank_s.sum()
    assert flush_s("1f1b", ranks, 1, batches, times, np.zeros(1)) == pytest.approx(expected, rel=0.02)


@given(st.sampled_from(_SCHEDULES), st.integers(2, 5), st.integers(2, 5), st.integers(0, 1000))
def test_no_rank_does_two_things_at_once_and_nothing_starts_before_its_input(
    schedule: tuple[ScheduleName, int], ranks: int, rounds: int, seed: int
) -> None:
    name, per_rank = schedule
    times, hop = uneven(ranks * per_rank, seed), 0.1
    spans = timeline(name, ranks, per_rank, rounds * ranks, times, hop)
    ends: dict[tuple[str, int, int], tuple[float, int]] = {}
    free = [0.0] * ranks
    for span in spans:
        kind, stage, number = span.action
        assert span.begin_s >= free[span.rank] - 1e-9
        free[span.rank] = span.end_s
        source = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        if kind != "W" and 0 <= source[1] < ranks * per_rank:
            end, rank = ends[(*source, number)]
            assert span.begin_s >= end + (hop if rank != span.rank else 0) - 1e-9
        if kind != "W":
            ends["F" if kind == "F" else "B", stage, number] = (span.end_s, span.rank)
    assert max(free) == pytest.approx(
        float(flush_s(name, ranks, per_rank, rounds * ranks, times, np.array([hop]))[0])
    )


@given(st.sampled_from(_SCHEDULES), st.integers(2, 4), st.integers(0, 1000))
def test_layouts_computed_together_are_those_computed_alone(
    schedule: tuple[ScheduleName, int], ranks: int, seed: int
) -> None:
    name, per_rank = schedule
    times = uneven(ranks * per_rank, seed, layouts=3)
    together = flush_s(name, ranks, per_rank, 4 * ranks, times, np.array([0.0, 0.1, 0.2]))
    for layout, hop in enumerate((0.0, 0.1, 0.2)):
        alone = StageTimes(*(seconds[layout : layout + 1] for seconds in vars(times).values()))
        assert flush_s(name, ranks, per_rank, 4 * ranks, alone, np.array([hop])) == together[layout]


@pytest.mark.parametrize(("name", "per_rank"), _SCHEDULES)
def test_a_long_schedule_followed_in_part_is_near_the_whole(name: ScheduleName, per_rank: int) -> None:
    times, hops = uneven(4 * per_rank, seed=3, layouts=8), np.full(8, 0.05)
    batches = 400 if name == "interleaved" else 401
    full_s = flush_s(name, 4, per_rank, batches, times, hops)
    part_s = flush_s(name, 4, per_rank, batches, times, hops, max_actions=4 * 3 * per_rank * 40)
    assert part_s == pytest.approx(full_s, rel=0.01)

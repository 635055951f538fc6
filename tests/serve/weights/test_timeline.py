"""The closed form of streaming against its limits, and against a simulation that knows nothing of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.weights.ring import timeline

SECONDS = st.floats(0.01, 10)


@given(st.integers(2, 12), SECONDS, SECONDS, st.integers(2, 5))
def test_equal_layers_take_the_larger_of_reading_and_computing(
    layers: int, read: float, compute: float, buffers: int
) -> None:
    found = timeline([read] * layers, [compute] * layers, buffers, passes=60)
    assert found.pass_seconds == pytest.approx(layers * max(read, compute))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_one_buffer_reads_and_computes_in_turns(layers: list[tuple[float, float]]) -> None:
    read, compute = zip(*layers, strict=True)
    assert timeline(read, compute, 1).pass_seconds == pytest.approx(sum(read) + sum(compute))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8), st.integers(1, 6))
def test_every_read_and_computation_starts_when_the_last_of_what_it_waits_for_has_ended(
    layers: list[tuple[float, float]], buffers: int
) -> None:
    passes, count = 3, len(layers)
    read_end: list[float] = []
    compute_end: list[float] = []
    for place in range(passes * count):
        read, compute = layers[place % count]
        before = max(read_end[-1] if place else 0, compute_end[place - buffers] if place >= buffers else 0)
        read_end.append(before + read)
        compute_end.append(max(read_end[-1], compute_end[-1] if place else 0) + compute)
    found = timeline(*zip(*layers, strict=True), buffers, passes)
    assert found.pass_ends == pytest.approx(compute_end[count - 1 :: count])


def test_a_resident_layer_is_not_waited_for() -> None:
    assert timeline([0.0, 0.0], [1.0, 2.0], 1).pass_seconds == 3
    assert timeline([0.0, 0.0], [1.0, 2.0], 1).stalls == (0, 0)


def test_streaming_without_a_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        timeline([1.0], [1.0], 0)

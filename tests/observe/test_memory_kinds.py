"""Memory by kind."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.step.meters import MemoryByKind

RANK = MemoryByKind(
    parameters=4 << 20, gradients=4 << 20, optimizer=8 << 20, activations=3 << 30, buffers=12, other=0
)


def test_what_cannot_be_seen_is_not_in_the_total() -> None:
    assert dataclasses.replace(RANK, activations=None).total == (16 << 20) + 12


@given(st.lists(st.integers(0, 1 << 50), min_size=6, max_size=6))
def test_the_total_is_the_sum_of_the_kinds(values: list[int]) -> None:
    assert MemoryByKind(*values).total == sum(values)

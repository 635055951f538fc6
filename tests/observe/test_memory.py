"""Memory by kind, for people."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.memory import KINDS, MemoryByKind, as_text, size

RANK = MemoryByKind(
    parameters=4 << 20, gradients=4 << 20, optimizer=8 << 20, activations=3 << 30, buffers=12, other=0
)


def test_every_kind_and_the_total_have_a_line() -> None:
    assert [line.split()[0] for line in as_text([RANK]).splitlines()] == [*KINDS, "total"]
    assert tuple(field.name for field in dataclasses.fields(MemoryByKind)) == KINDS


def test_the_most_of_any_rank_is_shown_and_the_least_where_it_differs() -> None:
    less = dataclasses.replace(RANK, activations=1 << 30)
    line = as_text([RANK, less]).splitlines()[KINDS.index("activations")]
    assert "3.0 GiB" in line
    assert "(least 1.0 GiB)" in line
    assert "least" not in as_text([RANK, RANK])


def test_what_cannot_be_seen_is_said_to_be_so() -> None:
    unseen = dataclasses.replace(RANK, activations=None)
    assert "not seen" in as_text([unseen])
    assert unseen.total == (16 << 20) + 12


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 41, "2.0 TiB"), (1 << 60, "1048576.0 TiB")],
)
def test_sizes_are_written_with_binary_units(count: int, text: str) -> None:
    assert size(count) == text


@given(st.lists(st.integers(0, 1 << 50), min_size=6, max_size=6))
def test_the_total_is_the_sum_of_the_kinds(values: list[int]) -> None:
    assert MemoryByKind(*values).total == sum(values)

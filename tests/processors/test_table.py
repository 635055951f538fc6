"""Failures in the table of instruction sets and threads."""

from __future__ import annotations

import pytest

from processors.table import Cell, problems_of

WEIGHTS, OTHERS = "a" * 64, "b" * 64


def cell(portable: str = WEIGHTS, native: str = WEIGHTS, **counts: int) -> Cell:
    """A cell with empty output."""
    return Cell({"passed": 7, **counts}, portable, native, "")


def test_a_table_whose_cells_have_one_portable_hash_has_no_problem() -> None:
    assert problems_of({("avx2", 1): cell(native=OTHERS, skipped=2), ("avx2", 2): cell()}) == []


@pytest.mark.parametrize("numerics", ["portable", "native"])
def test_a_run_without_a_hash_is_a_failure_also_if_every_cell_is_like_it(numerics: str) -> None:
    cells = {("avx2", threads): cell(**{numerics: ""}) for threads in (1, 2)}  # type: ignore[arg-type]
    assert problems_of(cells) == [
        f"avx2, {threads} threads: {numerics} numerics gave no hash: the run failed" for threads in (1, 2)
    ]


def test_a_cell_in_which_a_test_failed_or_none_passed_is_a_failure() -> None:
    cells = {("default", 1): cell(failed=1), ("all", 8): cell(passed=0, skipped=9)}
    assert problems_of(cells) == ["default, 1 threads: 1 tests failed", "all, 8 threads: no test passed"]


def test_two_portable_hashes_are_a_failure() -> None:
    cells = {("avx2", 1): cell(), ("all", 1): cell(portable=OTHERS)}
    assert problems_of(cells) == ["portable numerics has other bits in some cells"]

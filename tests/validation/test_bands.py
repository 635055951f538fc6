"""Bands from published runs: they hold their share of left-out runs, and they are those of the package."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.evidence import learned
from validation.bands import (
    KINDS,
    LeftOut,
    coverage,
    intraclass,
    learn,
    left_out,
    position,
    program_coverage,
    quantile,
)
from validation.compare import outcome_of
from validation.judged import Judged, judged_rows, read_judged, write_judged
from validation.runs import TABLE, read_published
from validation.software import unseen_software_of_run

FEWEST_PROGRAMS = 4
"""With fewer, a band learned from the others is one or two programs' alone, and its coverage has no meaning."""


@lru_cache(maxsize=1)
def left() -> tuple[LeftOut, ...]:
    return left_out(read_judged())


NEVER_TOO_WIDE = pytest.param(
    "never",
    marks=pytest.mark.xfail(
        strict=True,
        reason="a goal that is missed: bands for never-seen software, corrected for few programs, hold more of the rows (docs/evidence/planner-accuracy.md)",
    ),
)


@pytest.mark.parametrize("kind", ["here", "elsewhere", NEVER_TOO_WIDE])
def test_bands_for_eighty_of_a_hundred_hold_as_many_runs_of_software_that_was_left_out(kind: str) -> None:
    for mixture in (False, True):
        judged_runs = [run for run in left() if (run.kind, run.judged.mixture) == (kind, mixture)]
        if len({run.judged.software for run in judged_runs}) >= FEWEST_PROGRAMS:
            assert 0.75 <= coverage(judged_runs, 0.1) <= 0.85
    assert 0.75 <= coverage([run for run in left() if run.kind == kind], 0.1) <= 0.85


DENSE = (12, 5, 10, 8, 73, 3, 15, 20, 158, 77, 60, 34)
MIXTURES = (21, 104, 58, 2, 11)
"""Runs of each program in the published table."""


def drawn(sizes: Sequence[int], correlation: float, seed: int) -> list[Judged]:
    """Programs whose logarithms of ratios are normal, a share ``correlation`` of their variance between programs."""
    generator = random.Random(seed)
    rows = []
    for program, size in enumerate(sizes):
        common = generator.gauss(0, 0.2 * math.sqrt(correlation))
        own = [generator.gauss(0, 0.2 * math.sqrt(1 - correlation)) for _ in range(size)]
        # One model, so that it is judged only as software that was never seen.
        rows += [
            replace(row, model="m") for row in rows_of(f"p{program}", [math.exp(common + x) for x in own])
        ]
    return rows


@pytest.mark.parametrize(("sizes", "correlation"), [(DENSE, 0.44), (MIXTURES, 0.3)])
def test_in_programs_drawn_like_the_tables_bands_hold_their_share_and_uncorrected_ones_do_not(
    sizes: Sequence[int], correlation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [drawn(sizes, correlation, seed) for seed in range(10 if len(sizes) > 6 else 36)]

    def held() -> float:
        left_out_runs = [left_out(rows) for rows in tables]
        assert {run.kind for each in left_out_runs for run in each} == {"never"}
        return fmean(program_coverage(each, 0.1) for each in left_out_runs)

    assert held() == pytest.approx(0.8, abs=0.02)
    monkeypatch.setattr("validation.bands.position", lambda level, _worth: level)
    assert held() < 0.785


@pytest.mark.parametrize("kind", KINDS)
def test_they_hold_as_many_where_each_program_has_one_vote(kind: str) -> None:
    assert 0.75 <= program_coverage([run for run in left() if run.kind == kind], 0.1) <= 0.85


def test_the_packages_table_is_learned_from_the_judged_runs() -> None:
    relearned = learn(read_judged())
    coverless = tuple(replace(kind, covered_80=0.0, covered_90=0.0) for kind in learned().kinds)
    # As JSON, where a tuple and a list are one.
    assert msgspec.to_builtins(replace(learned(), kinds=coverless)) == msgspec.to_builtins(relearned)


def test_the_packages_table_is_of_the_published_table_as_it_is() -> None:
    digest = hashlib.sha256(TABLE.read_bytes()).hexdigest()
    assert learned().made_from["sha256"] == digest, f"run {learned().made_from['command']}"


def test_runs_are_judged_as_the_planner_predicts_them_now(tmp_path: Path) -> None:
    rows = [run for run in read_published() if run.id in {judged.run for judged in read_judged()}][40::250]
    judged_again = judged_rows(
        [outcome_of(run) for run in rows], [outcome_of(run, unseen_software_of_run(run)) for run in rows]
    )
    write_judged(judged_again, tmp_path / "rows.csv")
    assert read_judged(tmp_path / "rows.csv") == judged_again
    stored = {judged.run: judged for judged in read_judged()}
    for judged in judged_again:
        stored_row = stored[judged.run]
        assert (judged.ratio, judged.unseen_ratio) == pytest.approx(
            (stored_row.ratio, stored_row.unseen_ratio), rel=1e-3
        )
        assert judged.unseen_free == pytest.approx(stored_row.unseen_free, abs=1e-3)
        assert replace(judged, ratio=1, unseen_ratio=1, unseen_free=0) == replace(
            stored_row, ratio=1, unseen_ratio=1, unseen_free=0
        )


def rows_of(software: str, ratios: list[float], accelerator: str = "h100") -> list[Judged]:
    return [
        Judged(
            f"{software}{n}", software, software, accelerator, f"m{n}", False, "bf16", ratio, ratio, 0.1, 0.4
        )
        for n, ratio in enumerate(ratios)
    ]


def test_what_a_left_out_software_did_changes_nothing_of_the_band_that_it_is_judged_by() -> None:
    others = rows_of("a", [1.0, 1.1, 1.2]) + rows_of("b", [0.9, 1.0, 1.3])
    for ratio in (1.0, 9.0):
        left_out_runs = [
            run for run in left_out(others + rows_of("c", [ratio] * 3)) if run.judged.software == "c"
        ]
        unseen = [run.band for run in left_out_runs if run.kind == "never"]
        assert unseen == [
            run.band
            for run in left_out(others + rows_of("c", [2.0] * 3))
            if run.judged.software == "c" and run.kind == "never"
        ]


@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=20), level=st.floats(0, 1))
def test_a_quantile_is_between_the_least_and_the_largest_value(values: list[float], level: float) -> None:
    value_at_level = quantile([(value, 1.0) for value in values], level)
    assert min(values) - 1e-9 <= value_at_level <= max(values) + 1e-9


@given(values=st.lists(st.integers(-9, 9), min_size=1, max_size=12, unique=True), data=st.data())
def test_one_more_run_is_below_the_kth_smallest_of_n_with_probability_k_in_n_plus_1(
    values: list[int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, len(values)))
    level = position(rank / (len(values) + 1), len(values))
    value_at_level = quantile([(float(value), 1.0) for value in values], level)
    assert value_at_level == pytest.approx(sorted(values)[rank - 1])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [([[1.0, 1.0], [2.0, 2.0]], 1.0), ([[1.0, 2.0], [2.0, 1.0]], 0.0), ([[1.0, 2.0]], 0.5)],
)
def test_runs_of_one_software_are_correlated_as_far_as_software_differs(
    groups: list[list[float]], expected: float
) -> None:
    assert intraclass(groups) == pytest.approx(expected)


def test_from_one_software_alone_a_band_is_that_of_its_own_models() -> None:
    rows = [row for row in read_judged() if row.software == "torchtitan"]
    (record,) = learn(rows).software
    ratios = [row.ratio for row in rows]
    assert min(ratios) / 2 < record.ratios[0] <= record.ratios[-1] < 2 * max(ratios)

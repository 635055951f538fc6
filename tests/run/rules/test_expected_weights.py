"""A finished run's weights are compared with those that its run file expects of just this run on just this dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from phalanx.cli.train.session import result_table
from phalanx.run.directory.paths import RunDirectory, RunResult
from phalanx.run.identity import run_owned
from phalanx.run.rules import Comparison, compared, expected_weights_problems
from phalanx.run.spec import ExpectSpec, RunSpec

KEY, WEIGHTS, OTHER = "0123456789abcdef" * 4, "a" * 64, "b" * 64


def expecting(*entries: str) -> RunSpec:
    return RunSpec(expect=ExpectSpec(entries))


def test_nothing_is_compared_where_nothing_is_expected() -> None:
    assert compared(RunSpec(), KEY, WEIGHTS) is None


@pytest.mark.parametrize("digits", [8, 12, 64])
def test_weights_of_the_run_are_equal_or_different(digits: int) -> None:
    spec = expecting(f"ffffffff {OTHER}", f"{KEY[:digits]} {WEIGHTS}")
    assert compared(spec, KEY, WEIGHTS) == "equal"
    assert compared(spec, KEY, OTHER) == "different"


def test_another_run_or_dataset_is_not_compared() -> None:
    assert compared(expecting(f"ffffffff {WEIGHTS}"), KEY, WEIGHTS) == "not expected"


@pytest.mark.parametrize(
    "entry", ["", KEY, f"0123 {WEIGHTS}", f"{KEY} {WEIGHTS[1:]}", f"{KEY.upper()} {WEIGHTS}"]
)
def test_an_entry_that_is_no_key_and_hash_is_refused_by_its_field(entry: str) -> None:
    (problem,) = expected_weights_problems(expecting(f"{KEY} {WEIGHTS}", entry))
    assert problem.path == "expect.weights[1]"


def test_what_is_expected_does_not_make_another_run() -> None:
    assert run_owned(expecting(f"{KEY} {WEIGHTS}")) == run_owned(RunSpec())


@pytest.mark.parametrize("comparison", ["equal", "different", "not expected"])
def test_the_closing_table_shows_the_comparison(comparison: Comparison, tmp_path: Path) -> None:
    result = RunResult(step=1, weights_sha256=WEIGHTS)
    console = Console(width=200, record=True)
    console.print(result_table(result, RunDirectory(tmp_path), comparison=comparison))
    words = {
        "equal": "equal to the hash",
        "different": "different from the hash",
        "not expected": "not compared",
    }
    assert words[comparison] in console.export_text()

"""Runs side by side: what differs, which is better, and whether they have the bits that they must."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.runs.recorded import compare
from watch.runs.some_runs import make_run


def test_settings_that_differ_are_named_with_their_owner_and_each_runs_value(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3), ("c", 1e-3)):
        make_run(tmp_path / name, lr=lr)
    comparison = compare([tmp_path / name for name in "abc"])
    differing = {setting.path: (setting.owner, setting.values) for setting in comparison.settings}
    assert differing["optimizer.lr"] == ("run", (1e-3, 2e-3, 1e-3))
    assert differing["name"][0] == "fleet"
    assert next(iter(differing)) == "optimizer.lr"  # fields of the run come first
    assert not comparison.same_bits.expected
    assert comparison.same_bits.parts_at == 1
    assert comparison.same_bits.numbers == {"lr": (1e-3, 2e-3, 1e-3)}


def test_runs_of_one_identity_must_have_the_same_bits_and_the_first_other_bit_is_found(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "a", losses={4: 1.5})
    make_run(tmp_path / "b", losses={4: math.nextafter(1.5, 2)})
    same_bits = compare([tmp_path / "a", tmp_path / "b"]).same_bits
    assert same_bits.expected
    assert (same_bits.parts_at, same_bits.steps_compared) == (4, 4)
    assert same_bits.numbers == {"loss": (1.5, math.nextafter(1.5, 2))}


def test_equal_runs_do_not_part_also_where_a_loss_is_not_a_number(tmp_path: Path) -> None:
    for name in "ab":
        make_run(tmp_path / name, losses={4: math.nan})
    same_bits = compare([tmp_path / "a", tmp_path / "b"]).same_bits
    assert (same_bits.expected, same_bits.parts_at, same_bits.steps_compared) == (True, None, 6)


def test_the_environment_shows_what_differs_and_nothing_else(tmp_path: Path) -> None:
    for name, torch in (("a", "2.13.0"), ("b", "2.14.0")):
        make_run(tmp_path / name, environment={"packages": {"torch": torch, "numpy": "2.4"}})
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    assert [(entry.path, entry.values) for entry in comparison.environment] == [
        ("packages.torch", ("2.13.0", "2.14.0"))
    ]


def test_the_better_result_is_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=3, of=6, ending="stopped")
    make_run(tmp_path / "b", steps=5, of=6, ending="stopped")
    summary = {row.name: row for row in compare([tmp_path / "a", tmp_path / "b"]).summary}
    assert summary["loss"].best == 1
    assert summary["step"].best is None


def test_one_run_alone_and_what_is_no_run_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="give 2 to"):
        compare([tmp_path / "a"])
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        compare([tmp_path / "a", tmp_path / "nowhere"])

"""Fleets disturbed from outside: signals, damaged files and strangers end no run without a word, and change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet import outside

KINDS = ("signals", "files", "strangers")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan",
    [
        [outside.Disturbance(3, "kill", "agent"), outside.Disturbance(5, "stop", "coordinator", 8.0)],
        [
            outside.Disturbance(3, "flip", "journal", then_kill="coordinator"),
            outside.Disturbance(6, "garbage"),
        ],
        [
            outside.Disturbance(3, "empty", "fleet.json", then_kill="coordinator"),
            outside.Disturbance(6, "idle"),
        ],
        [outside.Disturbance(4, "kill", "launcher"), outside.Disturbance(6, "stop", "worker", 2.0)],
    ],
    ids=["signals", "journal", "fleet.json", "launcher"],
)
def test_a_fleet_that_is_disturbed_from_outside_ends_with_the_undisturbed_weights(
    plan: list[outside.Disturbance], run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    run_file = fleet_file(run_file, tmp_path)
    outcome = outside.disturbed(run_file, "zero3", 0, plan, undisturbed, tmp_path / "run", bound_s=240.0)
    assert (outcome.ending, outcome.message) == ("same", "")
    assert len(outcome.disturbances) == len(plan)


def fleet_file(run_file: Path, folder: Path) -> Path:
    file = folder / "fleet.toml"
    file.write_text(
        run_file.read_text() + "[fleet]\nnodes = 2\nspares = 1\nheartbeat_s = 1.0\nlease_s = 5.0\n"
    )
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_whose_run_directory_is_removed_ends_with_a_message(
    run_file: Path, undisturbed: str, tmp_path: Path
) -> None:
    plan = [outside.Disturbance(3, "delete", ".", then_kill="coordinator")]
    run_file = fleet_file(run_file, tmp_path)
    outcome = outside.disturbed(run_file, "zero3", 0, plan, undisturbed, tmp_path / "run", bound_s=240.0)
    assert outcome.ending == "refused"
    assert "is gone" in outcome.message


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_a_seed_determines_the_disturbances_and_none_is_after_the_last_steps(seed: int, count: int) -> None:
    plan = outside.planned(seed, count, 30, KINDS)
    assert plan == outside.planned(seed, count, 30, KINDS)
    assert len(plan) == count
    assert all(2 <= disturbance.at_step <= 20 for disturbance in plan)


def test_damaging_a_file_changes_it_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    chance = outside.random.Random(0)
    for damage in outside.DAMAGES:
        for name, file in (("record.json", "record.json"), ("journal", "fleet/journal-000.jsonl")):
            (tmp_path / file).write_bytes(b"twelve bytes")
            assert outside.damage(tmp_path, name, damage, chance)
            left = (tmp_path / file).read_bytes() if (tmp_path / file).exists() else None
            assert left != b"twelve bytes"
            assert (left is None) == (damage == "delete")
    assert not outside.damage(tmp_path, "events.jsonl", "flip", chance)

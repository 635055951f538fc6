"""The suite's two lanes: files that wait run one after the other, and no worker idles while it could compute."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lanes import WAITING, is_waiting, next_file

FLEETS = ["tests/chaos/test_kill.py", "tests/fleet/node/test_worker.py"]
COMPUTING = ["tests/train/test_layouts.py", "tests/model/test_presets.py", "tests/run/test_check.py"]


def run_all(files: list[str], workers: list[int]) -> list[tuple[int, str]]:
    """Give the files to workers that become idle in this order; return which worker ran which file."""
    remaining, runs = list(files), []
    for worker in workers:
        if (file := next_file(remaining, worker)) is not None:
            remaining.remove(file)
            runs.append((worker, file))
    return runs


@given(st.permutations(FLEETS + COMPUTING), st.lists(st.integers(0, 3), max_size=20))
def test_no_two_workers_run_files_that_wait(files: list[str], workers: list[int]) -> None:
    assert all(worker == 0 for worker, file in run_all(files, workers) if is_waiting(file))


@given(st.permutations(FLEETS + COMPUTING), st.lists(st.integers(0, 3), max_size=20))
def test_every_file_is_run_once_if_the_first_worker_lives(files: list[str], workers: list[int]) -> None:
    runs = run_all(files, workers + [0] * len(files))
    assert sorted(file for _, file in runs) == sorted(files)


def test_the_first_worker_computes_when_nothing_waits_any_more() -> None:
    assert next_file(COMPUTING, 0) == COMPUTING[0]


def test_workers_that_compute_meet_in_the_middle_of_the_list() -> None:
    assert [file for _, file in run_all(COMPUTING, [1, 2, 1])] == [COMPUTING[0], COMPUTING[2], COMPUTING[1]]


def test_every_folder_of_the_waiting_lane_is_there() -> None:
    root = Path(__file__).parent.parent
    assert all((root / folder).exists() for folder in WAITING)

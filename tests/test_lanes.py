"""The suite's two lanes: files that wait run one after the other, no worker idles while it could compute, and a crash ends one test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
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


CONFTEST = """
import lanes

def pytest_configure(config):
    config.pluginmanager.register(lanes.Lanes())
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    if number == {crash}:
        os._exit(1)
    assert not {waits} or os.nice(0) == {niceness}
"""
FILES = {
    "chaos/test_1.py": 3,
    "chaos/test_2.py": 1,
    "run/test_1.py": 3,
    "run/test_2.py": 3,
    "run/test_3.py": 3,
}
"""Numbers of tests of two files that wait and three that compute."""
CRASHES = {
    "the last test of a file": {"run/test_1.py": 2},
    "both lanes": {"chaos/test_1.py": 0, "chaos/test_2.py": 0, "run/test_1.py": 0, "run/test_3.py": 2},
}
"""For each case the files whose workers crash, and in which test."""


def write_tests(folder: Path, crashes: Mapping[str, int]) -> None:
    """Write ``FILES``; those that wait assert that their priority is that of this process."""
    for name, count in FILES.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        waits = is_waiting(f"tests/{name}")
        path.write_text(TESTS.format(count=count, crash=crashes.get(name), waits=waits, niceness=os.nice(0)))
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")


@pytest.mark.parametrize("crashes", CRASHES.values(), ids=CRASHES)
def test_a_crash_of_a_worker_fails_one_test_and_all_others_run_once_in_their_lane(
    tmp_path: Path, crashes: Mapping[str, int]
) -> None:
    write_tests(tmp_path, crashes)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist", "loadfile", "-rA"]
    program = subprocess.run(
        [*command, "--no-loadscope-reorder", "--import-mode=importlib"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    outcomes = Counter(
        re.findall(r"^(PASSED|FAILED) tests/(\S+)::test_one\[(\d)\]", program.stdout, re.MULTILINE)
    )
    expected = {
        ("FAILED" if crashes.get(name) == number else "PASSED", name, str(number)): 1
        for name, count in FILES.items()
        for number in range(count)
    }
    assert outcomes == expected, program.stdout + program.stderr
    assert len(re.findall("^worker 'gw.' crashed while running", program.stdout, re.MULTILINE)) == len(
        crashes
    )
    assert program.returncode == 1

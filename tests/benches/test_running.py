"""A bench refuses below its memory, keeps its rows when a process is killed, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forked_python import Popen

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import argparse, os, subprocess, sys, time
sys.path.insert(0, {root!r})
from bench.running import Needs, record, run_bench

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--die", action="store_true")
    size = parser.parse_args().size
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = int(subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"]))
    record({{"size": size, "pids": [os.getpid(), bystander.pid, orphan, os.getppid()]}})
    print("a line")
    print("the last", end="")
    if "--die" in sys.argv:
        child = subprocess.Popen(["sh", "-c", "kill -KILL $$"])
    if size == 1:
        return
    time.sleep(600)

run_bench(main, Needs("a bench", memory_gib={gib}, minutes=1.0, small=("--size", "1"), smaller=("--size",)))
"""


class Bench:
    """A running bench, its file of rows, and its processes."""

    def __init__(self, folder: Path, *words: str, gib: float) -> None:
        self.out = folder / "rows.jsonl"
        program = folder / "size_bench.py"
        program.write_text(PROGRAM.format(root=str(ROOT), gib=gib))
        command = [sys.executable, str(program), "--out", str(self.out), *words]
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.process = Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )

    def rows(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def wait(self) -> tuple[int, str]:
        """Return the exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors

    def pids(self) -> list[int]:
        """Return its processes: the bench, two that it started, and the supervisor."""
        pids = self.rows()[0]["pids"]
        assert isinstance(pids, list)
        return pids

    def assert_nothing_left(self) -> None:
        assert [pid for pid in self.pids() if Path(f"/proc/{pid}").exists()] == []
        assert list(self.temporary.iterdir()) == []

    def has_left_nothing(self) -> bool:
        """Return True if no process is left and no temporary file."""
        processes = [pid for pid in self.pids() if Path(f"/proc/{pid}").exists()]
        return not processes and not list(self.temporary.iterdir())

    def end(self) -> None:
        """End all of it, if the test has failed on the way."""
        self.process.kill()
        self.process.communicate(timeout=240)


StartBench = Callable[..., Bench]


@pytest.fixture
def start_bench(tmp_path: Path) -> Iterator[StartBench]:
    """Start benches in the test's folder; what is left of them at its end is ended."""
    with ExitStack() as started:

        def start(*words: str, gib: float = 0.01) -> Bench:
            bench = Bench(tmp_path, *words, gib=gib)
            started.callback(bench.end)
            return bench

        yield start


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_child_killed_by_a_signal_ends_the_bench_which_names_both_and_keeps_its_rows(
    start_bench: StartBench,
) -> None:
    bench = start_bench("--die")
    code, errors = bench.wait()
    assert code == 5
    assert "child " in errors
    assert "killed by SIGKILL" in errors
    assert [row.get("size", row.get("line")) for row in bench.rows()] == [8, "a line", "the last"]
    bench.assert_nothing_left()


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        pytest.param(os.killpg, signal.SIGINT, 130, id="by Ctrl-C"),
        pytest.param(os.kill, signal.SIGINT, 130, id="by SIGINT to its process alone"),
        pytest.param(os.kill, signal.SIGTERM, 143, id="by SIGTERM"),
    ],
)
def test_a_bench_that_is_stopped_leaves_nothing(
    start_bench: StartBench, send: Callable[[int, int], None], number: int, code: int
) -> None:
    bench = start_bench()
    until(lambda: len(bench.rows()) == 2)
    send(bench.process.pid, number)
    assert bench.wait()[0] == code
    bench.assert_nothing_left()
    assert bench.rows()[-1] == {"line": "the last"}, "the bench was interrupted, not killed"


def test_a_bench_whose_first_process_is_killed_leaves_nothing(start_bench: StartBench) -> None:
    bench = start_bench()
    until(lambda: len(bench.rows()) == 2)
    bench.process.kill()
    assert bench.wait()[0] == -signal.SIGKILL
    until(bench.has_left_nothing)


def test_a_bench_whose_supervisor_is_killed_leaves_nothing_and_says_by_which_signal(
    start_bench: StartBench,
) -> None:
    bench = start_bench()
    until(lambda: len(bench.rows()) == 2)
    os.kill(bench.pids()[-1], signal.SIGKILL)
    code, errors = bench.wait()
    assert (code, "killed by SIGKILL" in errors) == (137, True)
    bench.assert_nothing_left()


def test_a_bench_that_the_kernel_kills_leaves_nothing_and_says_by_which_signal(
    start_bench: StartBench,
) -> None:
    bench = start_bench()
    until(lambda: len(bench.rows()) == 2)
    os.kill(bench.pids()[0], signal.SIGKILL)
    code, errors = bench.wait()
    assert (code, "killed by SIGKILL" in errors) == (137, True)
    bench.assert_nothing_left()


def test_a_bench_refuses_below_its_memory_and_names_the_memory_and_smaller_options(
    start_bench: StartBench,
) -> None:
    bench = start_bench(gib=1e6)
    code, errors = bench.wait()
    assert code == 3
    assert "needs 1000000.0 GiB of memory" in errors
    assert "--small or --size" in errors
    assert bench.rows() == []


def test_a_small_bench_runs_where_the_usual_sizes_have_no_memory(start_bench: StartBench) -> None:
    bench = start_bench("--small", gib=1e6)
    assert bench.wait() == (0, "")
    assert bench.rows()[0]["size"] == 1
    bench.assert_nothing_left()

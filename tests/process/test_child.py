"""Child processes: signals reach them alone, their ends are explained, and nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from open_files import open_pipes_and_files_below
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder, last_lines
from phalanx.process.child import Child, describe_exit, end_all
from phalanx_process import alive

PATIENCE_S = 60.0


def logged(folder: Path, *command: str) -> tuple[Child, Path]:
    """A child with a log, and the log's path."""
    order = LogOrder(folder / "logs" / "attempt-000-child.jsonl", "child", 0)
    return Child.start(command, output=ChildOutput(order, {})), order.path


def first_line(log: Path) -> str:
    while not (lines := last_lines(log, 1)):
        pass
    return lines[0].text


def test_a_leader_that_has_ended_keeps_its_number_until_its_group_is_killed(tmp_path: Path) -> None:
    child, log = logged(tmp_path, "sh", "-c", "sleep 600 & echo $!; exit 7")
    assert child.wait(PATIENCE_S) == 7
    assert Path(f"/proc/{child.pid}").exists(), "not reaped: nobody else can be given its number"
    helper = int(first_line(log))
    assert alive(helper)
    assert child.end() == 7
    assert not Path(f"/proc/{child.pid}").exists()
    while alive(helper):
        pass
    child.kill()  # reaches nobody
    assert child.end() == 7


@pytest.mark.parametrize(
    ("by_parent", "line", "level"),
    [(True, "was killed by SIGKILL by its launcher", "info"), (False, "was killed by SIGKILL", "error")],
)
def test_the_log_of_a_killed_child_says_whether_its_parent_killed_it(
    tmp_path: Path, by_parent: bool, line: str, level: str
) -> None:
    child, log = logged(tmp_path, "sleep", "600")
    if by_parent:
        child.kill()
    else:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(PATIENCE_S)
    assert child.end() == -signal.SIGKILL
    (last,) = last_lines(log, 1)
    assert (last.text, last.level) == (f"its process {line}", level)


@pytest.mark.parametrize(("code", "lines"), [(0, 0), (3, 0), (4, 1)])
def test_the_log_of_a_child_that_ended_as_it_should_says_nothing_of_it(
    tmp_path: Path, code: int, lines: int
) -> None:
    child, log = logged(tmp_path, "sh", "-c", f"exit {code}")
    child.wait(PATIENCE_S)
    assert child.end(fine=(0, 3)) == code
    assert len(last_lines(log, 9)) == lines


def test_a_child_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_pipes_and_files_below(tmp_path)
    with pytest.raises(FileNotFoundError):
        logged(tmp_path, "/nowhere/program")
    assert open_pipes_and_files_below(tmp_path) <= before


def test_a_child_reads_its_task_and_prints_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert Child.start(["cat"], task=b"a task\n").wait(PATIENCE_S) == 0
    assert capfd.readouterr() == ("", "a task\n")


def test_a_task_that_nobody_reads_is_no_error() -> None:
    child = Child.start(["sh", "-c", "exec 0<&-; exit 5"], task=b"x" * 60_000)
    assert child.wait(PATIENCE_S) == 5
    child.end()


def test_children_that_end_by_themselves_in_their_time_are_not_killed() -> None:
    children = [Child.start(["sleep", "600"]) for _ in range(2)]
    for child in children:
        child.signal(signal.SIGTERM)
    end_all(children, patience_s=PATIENCE_S)
    assert [child.exit_code() for child in children] == [-signal.SIGTERM] * 2


def test_children_together_have_one_patience_and_who_does_not_end_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = Child.start(["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"])
    obedient = Child.start(["sleep", "600"])
    while not ready.exists():
        pass
    for child in (stubborn, obedient):
        child.signal(signal.SIGTERM)
    obedient.wait(PATIENCE_S)  # before the stubborn one has used the patience up, however busy the machine is
    end_all((stubborn, obedient), patience_s=0.5)
    assert [child.exit_code() for child in (stubborn, obedient)] == [-signal.SIGKILL, -signal.SIGTERM]


def test_a_suspended_child_is_seen_and_can_be_killed() -> None:
    child = Child.start(["sleep", "600"])
    assert not child.is_suspended()
    child.signal(signal.SIGSTOP)
    while not child.is_suspended():
        pass
    assert child.end() == -signal.SIGKILL
    assert not child.is_suspended()


def test_a_child_may_be_signaled_by_other_threads_while_it_is_ended() -> None:
    for _ in range(20):
        child, begin = Child.start(["sleep", "600"]), threading.Barrier(4)

        def end(child: Child = child, begin: threading.Barrier = begin) -> int:
            begin.wait()
            return child.end()

        def kill(child: Child = child, begin: threading.Barrier = begin) -> int:
            begin.wait()
            child.kill()
            return child.end()

        with ThreadPoolExecutor(4) as pool:
            codes = [pool.submit(work) for work in (end, kill, end, kill)]
        assert [code.result() for code in codes] == [-signal.SIGKILL] * 4


def test_an_event_loop_waits_for_a_child_without_reaping_it() -> None:
    async def both() -> list[int]:
        children = [Child.start(["sh", "-c", "exit 7"]), Child.start(["sleep", "600"])]
        children[1].kill()
        codes = await asyncio.gather(*(child.wait_in_loop() for child in children))
        assert all(Path(f"/proc/{child.pid}").exists() for child in children)
        return codes + [child.end() for child in children]

    assert asyncio.run(both()) == [7, -signal.SIGKILL] * 2


PARENT = """
import sys, time
from phalanx.process.child import Child
Child.start([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
TIED = """
import os, time
from phalanx.process.child import {tie}
{tie}()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tie", ["die_with_parent", "watch_parent"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, tie: str) -> None:
    parent, log = logged(tmp_path, sys.executable, "-c", PARENT, TIED.format(tie=tie))
    grandchild = int(first_line(log))
    assert alive(grandchild)
    assert parent.end() == -signal.SIGKILL
    while alive(grandchild):
        pass


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with code 0"),
        (9, "ended with code 9"),
        (-9, "was killed by SIGKILL"),
        (-70, "was killed by signal 70"),
    ],
)
def test_an_exit_code_has_words(code: int, words: str) -> None:
    assert describe_exit(code) == words

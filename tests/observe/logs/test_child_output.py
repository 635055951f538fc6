"""The output of child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from open_files import open_pipes_and_files_below
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.line import ended_text
from phalanx.observe.logs.log_file import LogOrder, last_lines, order_for
from phalanx.run.spec import ObserveSpec


def run_child(order: LogOrder) -> None:
    """Start a child that prints a word, and wait until its log has been written."""
    output = ChildOutput(order, {})
    process = subprocess.Popen(
        [sys.executable, "-c", "print('a word')"],
        env={**os.environ, **output.environment},
        stdout=output.descriptor,
        pass_fds=output.inherited,
    )
    output.started()
    process.wait()
    output.ended("it ended")
    for thread in threading.enumerate():
        if thread.name.startswith("output of"):
            thread.join()


def test_a_child_that_has_ended_leaves_no_descriptor(tmp_path: Path) -> None:
    order = order_for(tmp_path / "logs" / "attempt-000-child.jsonl", "child", 0, ObserveSpec(), "node-0")
    run_child(order)
    before = open_pipes_and_files_below(tmp_path)
    for _ in range(3):
        run_child(order)
    assert open_pipes_and_files_below(tmp_path) <= before


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread of ``ChildOutput`` has read, eight bytes at most; the thread then waits until ``ended`` wakes it."""
    paused, woken, read, write = threading.Event(), threading.Event(), os.read, os.write

    def pausing_read(descriptor: int, count: int) -> bytes:
        if not threading.current_thread().name.startswith("output of"):
            return read(descriptor, count)
        if woken.is_set():
            threading.Event().wait(0.1)  # in which an ``ended`` that does not wait for this read returns
        try:
            return read(descriptor, min(count, 8))
        finally:
            paused.set()
            woken.wait()

    def noted_write(descriptor: int, data: bytes) -> int:
        count = write(descriptor, data)
        if data == b".":
            woken.set()
        return count

    monkeypatch.setattr(os, "read", pausing_read)
    monkeypatch.setattr(os, "write", noted_write)
    return paused


def texts_of(order: LogOrder) -> list[str]:
    return [line.text for line in last_lines(order.path, 9)]


def test_what_a_child_writes_while_its_pipe_was_found_empty_is_in_the_log_once_it_has_ended(
    tmp_path: Path, paused: threading.Event
) -> None:
    order = LogOrder(tmp_path / "logs" / "attempt-000-child.jsonl", "child", 0)
    output = ChildOutput(order, {})
    child_end = os.dup(output.descriptor)
    output.started()
    paused.wait()  # the thread has found the pipe empty, and has not acted on that yet
    os.write(child_end, b"last words\n")
    os.close(child_end)
    output.ended("it ended")
    assert texts_of(order) == ["last words", ended_text("it ended")]


def test_the_time_to_read_the_last_words_begins_with_the_end_of_the_child(
    tmp_path: Path, paused: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, now_s = LogOrder(tmp_path / "logs" / "attempt-000-child.jsonl", "child", 0), [0.0]
    monkeypatch.setattr("phalanx.observe.logs.child_output.time.monotonic", lambda: now_s[0])
    output = ChildOutput(order, {})
    child_end = os.dup(output.descriptor)
    os.write(child_end, b"1234567\nlast words\n")
    os.close(child_end)
    output.started()
    paused.wait()
    now_s[0] = 100.0  # a child that writes all the while is read all the while
    output.ended("it ended")
    assert texts_of(order) == ["1234567", "last words", ended_text("it ended")]


LIMITED = """
import os, resource, sys
from pathlib import Path
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder

def in_use():
    return sorted(map(int, os.listdir("/proc/self/fd")))

order = LogOrder(Path(sys.argv[1]) / "logs" / "attempt-000-child.jsonl", "child", 0)
ChildOutput(order, {}).failed()
before, (soft, hard) = in_use(), resource.getrlimit(resource.RLIMIT_NOFILE)
refused = []
for limit in range(max(before), max(before) + 16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        ChildOutput(order, {}).failed()
    except OSError:
        refused.append(limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert in_use() == before, limit
print(len(refused))
"""


def test_a_log_for_which_no_descriptors_are_left_leaves_none_open(tmp_path: Path) -> None:
    limited = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 0 < int(limited.stdout) < 16

"""An agent distinguishes a silent worker that is at work from one that sleeps or is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from phalanx.checkpoint.snapshot.segments import Segment, segments_from
from phalanx.fleet.node.worker_link import WorkerEnd
from phalanx.fleet.node.worker_pool import WorkerProcess
from phalanx.observe.logs.log_file import LogOrder, last_lines
from phalanx.process.child import Child
from phalanx.run.spec import RuntimeSpec

KEEPS_THE_LOCK = "print('x', flush=True); 7 ** 10 ** 9"
SLEEPS_WITH_THE_LOCK = "import ctypes; print('x', flush=True); ctypes.PyDLL(None).sleep(600)"


def started(program: str) -> tuple[Child, subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    return Child(process), process


def becomes(worker: Child, working: bool) -> bool:
    """True once it is so several looks in a row."""
    in_a_row = 0
    while in_a_row < 5:
        time.sleep(0.02)
        in_a_row = in_a_row + 1 if worker.is_working() == working else 0
    return True


@pytest.mark.parametrize(
    ("program", "working"),
    [(KEEPS_THE_LOCK, True), (SLEEPS_WITH_THE_LOCK, False)],
    ids=["computes", "sleeps"],
)
def test_native_code_that_keeps_pythons_lock_is_at_work_if_it_computes(program: str, working: bool) -> None:
    worker, process = started(program)
    assert becomes(worker, working)
    os.kill(process.pid, signal.SIGSTOP)
    assert becomes(worker, working=False)
    process.kill()
    process.communicate()
    assert not worker.is_working()


def test_a_worker_never_gets_the_operators_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_OPERATOR_TOKEN", "secret")
    monkeypatch.setenv("PHALANX_RUN_TOKEN", "known")
    program = "import os; print(*(name for name in os.environ if name.endswith('TOKEN')))"
    log = LogOrder(tmp_path / "logs" / "attempt-000-node-0-0.jsonl", "node-0-0", 0, "node-0")

    async def run() -> None:
        ended = asyncio.Event()
        command = [sys.executable, "-c", program]
        await WorkerProcess.start(
            command, [], RuntimeSpec(), log, lambda _message: None, lambda *_exit: ended.set()
        )
        await ended.wait()

    asyncio.run(run())
    assert [line.text for line in last_lines(log.path, 9)] == ["PHALANX_RUN_TOKEN"]


def test_a_worker_for_which_no_descriptors_are_left_leaves_none_open(tmp_path: Path) -> None:
    program = """
import asyncio, os, resource, sys
from pathlib import Path
from phalanx.fleet.node.worker_pool import WorkerProcess
from phalanx.observe.logs.log_file import LogOrder
from phalanx.run.spec import RuntimeSpec

def in_use():
    return sorted(map(int, os.listdir("/proc/self/fd")))

async def start():
    ended = asyncio.Event()
    nothing = lambda _message: None
    await WorkerProcess.start(["false"], [], RuntimeSpec(), log, nothing, lambda *_exit: ended.set())
    await ended.wait()

async def main():
    before, (soft, hard) = in_use(), resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in range(max(before), max(before) + 16):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            await start()
        except OSError:
            print("refused")
        else:
            return
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert in_use() == before, limit

log = LogOrder(Path(sys.argv[1]) / "logs" / "attempt-000-node-0-0.jsonl", "node-0-0", 0)
asyncio.run(main())
"""
    limited = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 0 < limited.stdout.count("refused") < 16


def test_a_program_that_a_worker_starts_has_neither_its_link_nor_its_snapshot_memory() -> None:
    ours, theirs = socket.socketpair()
    with ours, closing(Segment.create("of-an-agent")) as segment:
        link, memory = theirs.detach(), os.dup(segment.descriptor)
        for descriptor in (link, memory):
            os.set_inheritable(descriptor, True)  # as in a process that has inherited them
        worker, segments = WorkerEnd(link), segments_from([memory])
        assert not os.get_inheritable(link)
        assert not os.get_inheritable(memory)
        del worker
        segments[0].close()

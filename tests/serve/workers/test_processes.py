"""Reports of the supervisor of worker processes on one that cannot be started, and on one that starts slowly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
from msgspec import structs

from phalanx.process.restarts import RestartPolicy
from phalanx_serve.served import of_run
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.workers.router import RequestRouter, RouterSettings, Watcher
from phalanx_serve.workers.worker_process import WorkerEnded, WorkerProcesses, WorkerTask, work

TASK = WorkerTask("127.0.0.1", 1, "token", 0, "both", ServedRun("run", 1, "float32", None, 1, 64, "exact"))


def watch(
    enough: Callable[[list[WorkerEnded], list[float]], bool], *command: str, slow_start_s: float = 60.0
) -> tuple[list[WorkerEnded], list[float], str]:
    """Start one worker by ``command`` until enough reports have come. Return its ends, its slow starts, and its state then."""
    ends: list[WorkerEnded] = []
    slow: list[float] = []

    async def watched() -> str:
        policy = RestartPolicy(first_pause_s=0.01, most_deaths=2)
        supervised = WorkerProcesses(
            [TASK],
            {},
            ends.append,
            lambda _, seconds: slow.append(seconds),
            policy,
            command=command,
            slow_start_s=slow_start_s,
        )
        supervised.start()
        async with asyncio.timeout(200):
            while not enough(ends, slow):
                await asyncio.sleep(0.01)
        state = supervised.seats[0].state
        await supervised.end()
        return state

    state = asyncio.run(watched())
    return ends, slow, state


def test_the_reason_why_a_worker_cannot_be_started_is_reported() -> None:
    ends, _, state = watch(lambda ends, _: len(ends) == 2, "/nowhere/python")
    assert [(end.how.partition(" (")[0], end.again_s) for end in ends] == [
        ("cannot be started", 0.01),
        ("cannot be started", None),
    ]
    assert "No such file or directory" in ends[0].how
    assert (state, ends[0].seat.reason) == ("left", ends[1].how)


def test_the_traceback_of_a_defect_of_a_worker_is_printed_and_the_router_gets_the_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_served: ServedRun) -> None:
        raise KeyError("of a tensor")

    monkeypatch.setattr(of_run, "open_engine", fail)
    reasons: list[str] = []

    async def work_with_a_router() -> str:
        def ignore(*_: object) -> None:
            pass

        watcher = Watcher(ignore, lambda _, reason: reasons.append(reason), ignore, ignore)
        router = RequestRouter(TASK.token, RouterSettings(), watcher)
        server = await router.listen("127.0.0.1")
        task = structs.replace(TASK, port=server.sockets[0].getsockname()[1])
        reason = await asyncio.to_thread(work, task)
        async with asyncio.timeout(200):
            while not reasons:
                await asyncio.sleep(0.01)
        await router.end()
        server.close()
        return reason

    assert asyncio.run(work_with_a_router()) == "a defect: KeyError('of a tensor')"
    assert reasons == ["a defect: KeyError('of a tensor')"]
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert "in fail" in printed


def test_a_start_that_takes_long_is_reported_once() -> None:
    sleeping = (sys.executable, "-c", "import time; time.sleep(60)")
    ends, slow, state = watch(lambda _, slow: bool(slow), *sleeping, slow_start_s=0.05)
    assert (ends, slow, state) == ([], [0.05], "starting")


def test_a_process_that_ends_before_is_no_slow_start() -> None:
    ends, slow, _ = watch(lambda ends, _: len(ends) == 2, sys.executable, "-c", "raise SystemExit(3)")
    assert ([end.how for end in ends], slow) == (["ended with code 3"] * 2, [])


def test_a_worker_that_is_ended_is_not_ready_from_then_on() -> None:
    async def states() -> list[str]:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        supervised = WorkerProcesses([TASK], {}, lambda _: None, lambda *_: None, command=command)
        supervised.start()
        await asyncio.sleep(0)
        supervised.ready(0)
        before = supervised.seats[0].state
        supervised.kill(0)
        after = supervised.seats[0].state
        await supervised.end()
        return [before, after]

    assert asyncio.run(states()) == ["ready", "waiting"]

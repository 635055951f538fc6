"""The local launcher with ranks that end at once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.local import run_locally
from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import Restored, RunStarted, Step, Stopped
from phalanx.process.exit_codes import EXIT_STOPPED
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import LaunchSpec, RunSpec
from phalanx.train.lifecycle.ending import report_failure
from phalanx.train.start.open_run import OpenRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    """An open run directory."""
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    lock_fd = os.open(directory.lock, os.O_CREAT | os.O_RDWR)
    yield OpenRun(directory, RunSpec(), 0, lock_fd)
    os.close(lock_fd)


def start_instead(monkeypatch: pytest.MonkeyPatch, *command: str) -> list[subprocess.Popen[bytes]]:
    """Lets the launcher start ``command`` as each rank; returns the list to which the processes are added."""
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def other(_command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", other)
    return started


def show_nothing(_ended: Callable[[], bool]) -> None:
    """Leaves it to the launcher to wait."""


def test_the_error_of_an_earlier_process_is_not_taken_for_this_ranks(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_failure(ValueError("of an earlier life"), run.directory.log(0, 0), 0, 0)
    start_instead(monkeypatch, "false")
    ending = run_locally(run, 1, show_nothing)
    assert ending.failed_rank == 0
    assert ending.message.startswith("ended with exit code 1; ")
    assert ending.kind == ""


def test_the_class_of_the_error_that_a_rank_reported_is_known(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead(monkeypatch, "false")

    def report(_ended: Callable[[], bool]) -> None:
        report_failure(ValueError("no blocks"), run.directory.log(0, 0), 0, 0)

    ending = run_locally(run, 1, report)
    assert (ending.message, ending.kind) == ("no blocks", "ValueError")


def test_an_exception_while_the_ranks_run_stops_them_and_is_raised_once_they_have_ended(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    saves = f'trap "exit {EXIT_STOPPED}" TERM; touch {ready}; while :; do sleep 0.01; done'
    started = start_instead(monkeypatch, "sh", "-c", saves)

    def raise_at_an_event(ended: Callable[[], bool]) -> None:
        while not ready.exists():
            assert not ended()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_locally(run, 1, raise_at_an_event)
    assert [process.returncode for process in started] == [EXIT_STOPPED]


def test_a_rank_that_hangs_with_one_that_has_stopped_is_ended_and_the_run_has_stopped(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = f'[ $PHALANX_RANK = 0 ] && code={EXIT_STOPPED} && trap "exit $code" TERM || trap "" TERM; '
    ready = f"touch {tmp_path}/$PHALANX_RANK; while :; do sleep 0.01; done"
    start_instead(monkeypatch, "sh", "-c", hangs + ready)

    def stop_once_ready(ended: Callable[[], bool]) -> None:
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert not ended()
        os.kill(os.getpid(), signal.SIGTERM)

    impatient = replace(run, spec=replace(run.spec, launch=LaunchSpec(grace_s=1.0)))
    ending = run_locally(impatient, 2, stop_once_ready)
    assert (ending.status, ending.unsaved) == ("stopped", False)


@pytest.mark.parametrize(
    "recorded_last", [Step(7, 10, 2.0, 1.0, 1e-3, 0, 0.0, 0.1), Restored(7, "a disk"), Stopped(7, "saved")]
)
def test_the_launcher_records_a_stop_that_the_ranks_were_too_late_to_record(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded_last: Step | Restored | Stopped
) -> None:
    with EventLog(run.directory.events, run.attempt) as log:
        log.append(RunStarted("run", 10))
        log.append(recorded_last)
    start_instead(
        monkeypatch, "sh", "-c", f'trap "" TERM; touch {tmp_path}/ready; while :; do sleep 0.01; done'
    )

    def stop_twice(ended: Callable[[], bool]) -> None:
        while not (tmp_path / "ready").exists():
            assert not ended()
        os.kill(os.getpid(), signal.SIGTERM)
        while not notices:
            assert not ended()
        os.kill(os.getpid(), signal.SIGTERM)

    notices = list[str]()
    assert run_locally(run, 1, stop_twice, notices.append).unsaved
    stops = [event.body for event in read_events(run.directory.events) if isinstance(event.body, Stopped)]
    assert [stop.step for stop in stops] == [7]
    if not isinstance(recorded_last, Stopped):
        assert "ended at once, on a second request: there is no checkpoint yet" in stops[0].reason


def test_ranks_can_be_started_from_another_thread_than_the_main_one(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead(monkeypatch, "true")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_locally, run, 2, show_nothing).result().status == "finished"

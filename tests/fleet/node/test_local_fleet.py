"""The supervision of a local fleet, whose processes here end at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phalanx.fleet.node import local_fleet
from phalanx.fleet.node.local_fleet import LocalFleet, run_fleet
from phalanx.run.directory import RunDirectory
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.lifecycle.ending import report_failure
from phalanx.train.lifecycle.open_run import OpenRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    """The run of a user's own model, which lies in ``tmp_path / "source"``."""
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model_of_a_user.py").touch()
    lock_fd = os.open(directory.lock, os.O_CREAT | os.O_RDWR)
    yield OpenRun(directory, RunSpec(model=ModelSpec(factory="model_of_a_user:build")), 0, lock_fd)
    os.close(lock_fd)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The search paths of all processes that were started; each of them fails at once."""
    paths: list[str] = []
    start = subprocess.Popen

    def failing(_command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        paths.append(env["PYTHONPATH"])
        return start(["false"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    monkeypatch.setattr(local_fleet, "_COORDINATOR_PAUSE_S", 0.0)
    monkeypatch.syspath_prepend(tmp_path / "source")
    return paths


def show_nothing(_ended: Callable[[], bool]) -> None:
    """Leaves it to the launcher to wait."""


def test_a_coordinator_is_restarted_although_the_users_model_is_gone(
    run: OpenRun, tmp_path: Path, starts: list[str]
) -> None:
    def lose_the_model(_ended: Callable[[], bool]) -> None:
        (tmp_path / "source" / "model_of_a_user.py").unlink()

    assert run_fleet(run, LocalFleet(1), lose_the_model).status == "failed"
    assert len(starts) == 1 + 5  # an agent, and the coordinator until it is given up
    assert len(set(starts)) == 1
    assert starts[0].split(os.pathsep)[-1] == str((tmp_path / "source").resolve())


@pytest.mark.usefixtures("starts")
def test_the_error_of_an_earlier_life_is_not_taken_for_the_coordinators(run: OpenRun) -> None:
    report_failure(ValueError("of an earlier life"), run.directory.named_log(0, "coordinator"), 0)
    message = run_fleet(run, LocalFleet(1), show_nothing).message
    assert message.startswith("the coordinator could not run; the end of")


@pytest.mark.usefixtures("starts")
def test_an_exception_while_the_fleet_runs_asks_it_to_stop_and_is_raised_once_it_has_ended(
    run: OpenRun,
) -> None:
    ends: list[Callable[[], bool]] = []

    def raise_at_an_event(ended: Callable[[], bool]) -> None:
        ends.append(ended)
        raise ZeroDivisionError

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ZeroDivisionError),
    ):  # where no signal can be handled, too
        pool.submit(run_fleet, run, LocalFleet(1), raise_at_an_event).result()
    assert ends[0]()

"""The local launcher with ranks that end at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.local import run_locally
from phalanx.run.directory import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.ending import report_failure
from phalanx.train.lifecycle.open_run import OpenRun


def show_nothing(_ended: Callable[[], bool]) -> None:
    """Leaves it to the launcher to wait."""


def test_the_error_of_an_earlier_process_is_not_taken_for_this_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, start = RunDirectory(tmp_path), subprocess.Popen
    directory.logs.mkdir()
    report_failure(ValueError("of an earlier life"), directory.log(0, 0), 0, 0)

    def failing(_command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start(["false"], **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    lock_fd = os.open(directory.lock, os.O_CREAT | os.O_RDWR)
    try:
        ending = run_locally(OpenRun(directory, RunSpec(), 0, lock_fd), 1, show_nothing)
    finally:
        os.close(lock_fd)
    assert ending.failed_rank == 0
    assert ending.message.startswith("ended with exit code 1; the end of")

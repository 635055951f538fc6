"""``fleet.json`` as a file: what is written is read back, and its writer never waits for a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.fleet.control.fleet_file import FleetFile, read_fleet_file, write_fleet_file
from phalanx.fleet.core.state import FleetPhase


def test_the_state_of_a_fleet_is_written_without_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalled(_descriptor: int) -> None:
        raise AssertionError("the event loop of the coordinator would wait here")

    content = FleetFile(
        run="run",
        coordinator="127.0.0.1:1",
        coordinator_pid=1,
        written_unix_s=1.0,
        phase=FleetPhase.FINISHED,
        reason="",
        epoch=0,
        ranks=1,
        step=-1,
        step_s=0.0,
        recoveries=0,
        regroups=0,
        restarts=0,
        stopping=False,
        durable_steps=(),
        result_json="",
        members=(),
        happenings=(),
        stale=0,
        refused={},
    )
    monkeypatch.setattr(os, "fsync", stalled)
    write_fleet_file(tmp_path, content)
    assert read_fleet_file(tmp_path) == content

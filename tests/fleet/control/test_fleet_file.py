"""``fleet.json`` as a file: what is written is read back, after a power cut too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.fleet.control.fleet_file import FleetFile, read_fleet_file, write_fleet_file
from phalanx.fleet.core.state import FleetPhase


def test_the_state_of_a_fleet_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(descriptor: int) -> None:
        done.append("fsync")
        fsync(descriptor)

    def seen_rename(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    content = FleetFile(
        run="run",
        coordinator="127.0.0.1:1",
        leader="node-0",
        reign=1,
        coordinator_pid=1,
        written_unix_s=1.0,
        phase=FleetPhase.FINISHED,
        reason="",
        epoch=0,
        ranks=1,
        expected_nodes=2,
        step=-1,
        step_s=0.0,
        recoveries=0,
        regroups=0,
        restarts=0,
        stopping=False,
        durable_steps=(),
        unsaved_steps=0,
        result_json="",
        members=(),
        happenings=(),
        stale=0,
        refused={},
    )
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    write_fleet_file(tmp_path, content)
    assert done == ["fsync", "rename", "fsync"]
    assert read_fleet_file(tmp_path) == content

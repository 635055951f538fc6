"""A coordinator and its open files: enough from the start, or a refusal; and none left is no reason to die."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fleet.fleet_processes import FLEET, PATIENCE_S, Fleet, make_run
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.core import messages as m


def limited(soft: int, hard: int, nodes: int) -> subprocess.CompletedProcess[str]:
    """Raises the limit in a process that has these two."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from phalanx.fleet.control.transport import raise_descriptor_limit\n"
        f"raise_descriptor_limit({nodes})\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_limit_is_raised_to_what_the_system_allows() -> None:
    assert limited(64, 600, nodes=100).stdout == "(600, 600)\n"


def test_a_system_that_allows_too_few_is_refused_with_the_number_and_the_remedy() -> None:
    refused = limited(64, 455, nodes=100)
    assert refused.returncode != 0
    for part in ("100 nodes", "456 open files", "455", "ulimit -Hn"):
        assert part in refused.stderr


def test_a_coordinator_without_descriptors_lives_and_serves_again_when_it_has_some(tmp_path: Path) -> None:
    spec = make_run(tmp_path, replace(FLEET, nodes=2))
    (tmp_path / "checkpoints").mkdir()
    fleet = Fleet(tmp_path)
    connections: list[socket.socket] = []
    try:
        fleet.start_coordinator()
        seen = fleet.until(lambda _: True)
        assert fleet.coordinator is not None
        pid = fleet.coordinator.pid
        few = len(os.listdir(f"/proc/{pid}/fd")) + 10
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, few))
        host, _, port = seen.coordinator.partition(":")
        for _ in range(40):
            with suppress(OSError):
                connections.append(socket.create_connection((host, int(port)), 2.0))
        log = tmp_path / "logs" / "coordinator.log"
        deadline_s = time.monotonic() + PATIENCE_S
        while "cannot look for checkpoints" not in log.read_text():
            assert fleet.coordinator.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        for connection in connections:
            connection.close()
        credentials = credentials_of(tmp_path, spec, 0, None)
        assert asyncio.run(operate(seen.coordinator, credentials, m.StopRun(), PATIENCE_S)) == "accepted"
        assert fleet.coordinator.wait(PATIENCE_S) == 0
    finally:
        for connection in connections:
            connection.close()
        fleet.end()

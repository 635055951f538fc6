"""What the goodput bench counts, and that it ends all processes of a server."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench import serve_goodput as bench

LOAD = bench.Load(rate=1.0, requests=4, ttft_s=1.0, tpot_s=0.1)


def test_requests_within_both_objectives_count() -> None:
    found = bench.Found([(0.5, 0.05), (1.0, 0.1), (1.1, 0.05), (0.5, 0.2)], 0, 4.0)
    assert found.goodput(LOAD) == 0.5
    assert "goodput 0.500 of 1.000 requests/s, 4 answered, 0 failed" in bench.line("ours", found, LOAD)


def test_a_side_that_answered_nothing_has_a_line_too() -> None:
    nothing = bench.Found([], 4, 2.0)
    assert nothing.goodput(LOAD) == 0
    assert bench.line("vLLM", nothing, LOAD) == "  vLLM: goodput 0, none answered, 4 failed"


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_servers_own_processes_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "child"
    program = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(told)!r}).write_text(f'{{child.pid}} '); time.sleep(60)"
    )
    monkeypatch.setattr(bench, "is_healthy", lambda _: told.exists() and told.read_text().endswith(" "))
    with bench.server("a server", [sys.executable, "-c", program], 1, tmp_path / "log", 1):
        child = int(told.read_text())
        assert runs(child)
    deadline = time.monotonic() + 20
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(child)

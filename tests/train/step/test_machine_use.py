"""Use of a machine by the counters of its kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.train.step.machines import MachineMeter


def write(proc: Path, busy: int, idle: int, received: int, sent: int) -> None:
    (proc / "net").mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n")
    zeros = " 0 0 0 0 0 0 0 "
    rows = f"    lo: 999{zeros}999{zeros}\n  eth0: {received}{zeros}{sent}{zeros}\n"
    (proc / "net" / "dev").write_text(f"Inter-|\n face |bytes\n{rows}")


def test_use_is_measured_between_two_readings(tmp_path: Path) -> None:
    now = [100.0]
    write(tmp_path, busy=50, idle=50, received=1000, sent=0)
    meter = MachineMeter(tmp_path, lambda: now[0])
    now[0] = 102.0
    write(tmp_path, busy=80, idle=60, received=5000, sent=400)
    assert meter.read() == {
        "cpu": pytest.approx(0.75),
        "memory_bytes": 600 * 1024,
        "received_bytes_per_s": 2000.0,
        "sent_bytes_per_s": 200.0,
    }


def test_a_machine_without_counters_has_no_figures(tmp_path: Path) -> None:
    assert MachineMeter(tmp_path).read() == {}

"""Processor time that a container's groups allow."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.observe.record.records import quota_cores


def write_proc(proc: Path, line: str) -> None:
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_cores(tmp_path, tmp_path) == math.inf


@pytest.mark.parametrize(
    ("own", "above", "cores"), [("250000 100000", "max 100000", 2.5), ("max 100000", "150000 100000", 1.5)]
)
def test_the_tightest_quota_of_the_group_and_all_above_it_counts(
    tmp_path: Path, own: str, above: str, cores: float
) -> None:
    write_proc(tmp_path / "proc", "0::/pod/container")
    root = tmp_path / "cgroup"
    (root / "pod" / "container").mkdir(parents=True)
    (root / "pod" / "container" / "cpu.max").write_text(own + "\n")
    (root / "pod" / "cpu.max").write_text(above + "\n")
    assert quota_cores(tmp_path / "proc", root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2.0), ("-1", math.inf)])
def test_groups_of_version_1_are_read(tmp_path: Path, quota: str, cores: float) -> None:
    write_proc(tmp_path / "proc", "4:cpu,cpuacct:/elsewhere")
    root = tmp_path / "cgroup" / "cpu"
    root.mkdir(parents=True)
    (root / "cpu.cfs_quota_us").write_text(quota + "\n")
    (root / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path / "proc", tmp_path / "cgroup") == cores

"""Memory of a process: the machine's, or what the tightest of all control groups above the process allows and leaves."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.snapshot.segments import free_memory_bytes, total_memory_bytes

MACHINE_BYTES = 100 << 10
UNLIMITED = {1: str(2**63 - 4096), 2: "max"}


def write_group(folder: Path, version: int, limit: str, used: int, cached: int = 0) -> None:
    """The files of one control group; ``cached`` bytes of ``used`` are pages of files."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, total = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }[version]
    (folder / limit_name).write_text(limit + "\n")
    (folder / usage_name).write_text(f"{used}\n")
    stat = f"anon 7\n{total}inactive_file {cached - cached // 3}\n{total}active_file {cached // 3}\n"
    (folder / "memory.stat").write_text(stat)


def write_proc(proc: Path, version: int, path: str, available_kb: int = 1 << 40) -> None:
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {MACHINE_BYTES >> 10} kB\nMemAvailable: {available_kb} kB\n")
    line = f"0::{path}" if version == 2 else f"4:cpu,memory:{path}\n0::/"
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")


def test_without_control_groups_it_is_the_machines_and_else_unlimited(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path, tmp_path) > 1 << 60
    assert total_memory_bytes(tmp_path, tmp_path) > 1 << 60
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 70 kB\n")
    assert free_memory_bytes(tmp_path, tmp_path) == 70 * 1024


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([1, 2]),
    st.lists(
        st.tuples(st.none() | st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**6),
)
def test_the_tightest_limit_of_the_group_and_all_above_it_counts(
    tmp_path_factory: pytest.TempPathFactory,
    version: int,
    groups: list[tuple[int | None, int, int]],
    available_kb: int,
) -> None:
    root = tmp_path_factory.mktemp("machine")
    mounted = root / "cgroup" / ("memory" if version == 1 else "")
    path, left = "", [available_kb * 1024]
    for depth, (limit, used, cached) in enumerate(groups):
        cached = min(cached, used)
        write_group(
            mounted / path.strip("/"),
            version,
            UNLIMITED[version] if limit is None else str(limit),
            used,
            cached,
        )
        left += [] if limit is None else [max(0, limit - (used - cached))]
        path += f"/group-{depth}" if depth < len(groups) - 1 else ""
    write_group(mounted / "a-neighbor", version, "0", 0)
    write_proc(root / "proc", version, path or "/", available_kb)
    assert free_memory_bytes(root / "proc", root / "cgroup") == min(left)
    limits = [limit for limit, _, _ in groups if limit is not None]
    assert total_memory_bytes(root / "proc", root / "cgroup") == min([*limits, MACHINE_BYTES])


def test_a_container_that_sees_its_own_group_as_the_root_counts_it_though_its_path_is_the_hosts(
    tmp_path: Path,
) -> None:
    write_group(tmp_path / "cgroup", 2, "150000", 130000, 30000)
    write_proc(tmp_path / "proc", 2, "/kubepods/pod-7/container-3")
    assert free_memory_bytes(tmp_path / "proc", tmp_path / "cgroup") == 50000

"""A machine that is slowed down while a run trains leaves a note in the run directory, for as long as it lasts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from phalanx.hardware.local.detect import CpuThrottles, QuotaThrottles, throttled_gpus
from phalanx.observe.record.notes import OVER_S, ThrottlingWatch, read_throttling
from phalanx.run.directory.paths import RunDirectory


def counts(root: Path, cpus: int = 4) -> list[Path]:
    """A tree as the kernel makes it, with the counts of each processor at 7."""
    places = []
    for cpu in range(cpus):
        for name in ("core_throttle_count", "package_throttle_count"):
            place = root / f"cpu{cpu}" / "thermal_throttle" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("7\n")
            places.append(place)
    (root / "cpufreq").mkdir()
    return places


def test_processors_are_named_whose_count_has_grown_since_the_last_look(tmp_path: Path) -> None:
    places = counts(tmp_path)
    throttles = CpuThrottles(tmp_path)
    assert throttles.new() == []
    places[2].write_text("9\n")
    places[4].write_text("10\n")
    assert throttles.new() == ["processors 1-2: clocks lowered for heat, 3 times"]
    assert throttles.new() == []


def test_a_machine_without_counts_or_with_counts_that_vanish_has_no_throttles(tmp_path: Path) -> None:
    assert CpuThrottles(tmp_path / "none").new() == []
    places = counts(tmp_path)
    throttles = CpuThrottles(tmp_path)
    places[0].unlink()
    places[1].write_text("garbage")
    assert throttles.new() == []


def cpu_stat(periods: int, stopped: int) -> str:
    return f"nr_periods {periods}\nnr_throttled {stopped}\nthrottled_time 900\n"


@pytest.mark.parametrize(
    ("line", "group"),
    [("0::/pod/box", "pod"), ("4:cpu,cpuacct:/pod/box", "cpu,cpuacct/pod/box"), ("0::/pod/box", ".")],
)
def test_a_cpu_limit_that_stops_a_control_group_or_one_above_it_is_named(
    tmp_path: Path, line: str, group: str
) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "groups"
    membership.write_text(f"1:memory:/other\n{line}\n")
    (root / group).mkdir(parents=True)
    stat = root / group / "cpu.stat"
    stat.write_text(cpu_stat(100, 50))
    quota = QuotaThrottles(root, membership)
    assert quota.new() == []
    stat.write_text(cpu_stat(200, 60))
    assert quota.new() == []  # a burst now and then
    stat.write_text(cpu_stat(300, 150))
    (sentence,) = quota.new()
    assert "stopped it in 90 of 100 periods" in sentence


def test_a_machine_without_control_groups_has_no_cpu_limit(tmp_path: Path) -> None:
    assert QuotaThrottles(tmp_path, tmp_path / "none").new() == []


@pytest.mark.parametrize(
    ("bits", "words"), [(0x1, []), (0x44, ["thermal slowdown by hardware"]), (0x80, ["power brake"])]
)
def test_a_gpu_is_named_only_for_reasons_of_trouble(
    monkeypatch: pytest.MonkeyPatch, bits: int, words: list[str]
) -> None:
    driver = ModuleType("pynvml")
    vars(driver).update(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _gpu: bits,
        nvmlDeviceGetPciInfo=lambda _gpu: SimpleNamespace(busId="0000:3b:00.0"),
        nvmlDeviceGetClockInfo=lambda _gpu, _clock: 600,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver)
    assert throttled_gpus() == [f"GPU 0 at 0000:3b:00.0: {word}, 600 MHz" for word in words]


def test_a_node_has_a_note_while_it_is_slowed_down_and_for_a_while_after(tmp_path: Path) -> None:
    directory, now, hot = RunDirectory(tmp_path), [1000.0], [["GPU 3 at b: power brake, 600 MHz"]]
    watch = ThrottlingWatch(directory, "node-1", lambda: hot[0], lambda: now[0])
    for _ in range(3):
        watch.once()
        now[0] += 10
    (note,) = read_throttling(directory, now[0])
    assert (note.node, note.since_s, note.seen_s, note.looks) == ("node-1", 1000.0, 1020.0, 3)
    hot[0] = []
    now[0] += OVER_S - 20
    watch.once()
    assert read_throttling(directory, now[0]) == [note]
    now[0] += 20
    watch.once()
    assert list(directory.machines.iterdir()) == []


def test_a_note_that_a_dead_process_left_is_passed_over_and_so_is_one_that_is_damaged(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    ThrottlingWatch(directory, "node-1", lambda: ["hot"], lambda: 1000.0).once()
    assert len(read_throttling(directory, 1000.0 + OVER_S)) == 1
    assert read_throttling(directory, 1001.0 + 2 * OVER_S) == []
    (directory.machines / "node-2.throttled").write_text('{"node": [')
    assert len(read_throttling(directory, 1000.0)) == 1


@pytest.mark.parametrize(
    ("since_s", "seen_s", "reasons"),
    [(990.0, 1000.0, []), (-1e300, 1000.0, ["hot"]), (1e300, 1e300, ["hot"]), (990.0, 1e300, ["hot"])],
)
def test_a_note_without_reasons_or_with_an_impossible_time_is_passed_over(
    tmp_path: Path, since_s: float, seen_s: float, reasons: list[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.machines.mkdir()
    note = {"node": "node-1", "since_s": since_s, "seen_s": seen_s, "looks": 1, "what": reasons}
    (directory.machines / "node-1.throttled").write_text(json.dumps(note))
    assert read_throttling(directory, 1000.0) == []

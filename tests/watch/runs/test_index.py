"""The list of runs: the row and the state of each, and a cache that may be lost or damaged."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.observe.event_log import EventLog
from phalanx.observe.events import RunStarted
from phalanx.run.directory.paths import RunDirectory
from phalanx.train.lifecycle.ending import RunFailedError, report_failure
from phalanx_watch.runs.index import RunIndex, RunRow
from phalanx_watch.runs.probe import KernelLocks
from phalanx_watch.runs.row import RunLabels, read_facts, row_of, write_labels
from watch.runs.some_runs import make_run


def rows(folder: Path, cache: Path) -> list[RunRow]:
    return RunIndex([folder], cache).rows()


def test_a_row_has_the_values_of_the_runs_files(tmp_path: Path) -> None:
    make_run(tmp_path / "a", environment={"code": {"git_commit": "c0ffee", "git_dirty": True}})
    write_labels(tmp_path / "a", RunLabels(("good",), "first"))
    (row,) = rows(tmp_path, tmp_path / "cache")
    assert (row.name, row.state, row.step, row.steps, row.ranks) == ("a", "finished", 6, 6, 2)
    assert (row.held_out_loss, row.bits_per_byte) == (3.5, 2.25)
    assert (row.commit, row.tags, row.note, row.weights_sha256) == ("c0ffee+", ("good",), "first", "ab" * 32)
    assert row.problems == ()


def test_an_edited_run_file_changes_no_runs_length_and_is_named(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", 6)
    record = json.loads(directory.record.read_text()) | {"fields": {"train.steps": 6}}
    directory.record.write_text(json.dumps(record))
    text = directory.run_file.read_text()
    directory.run_file.write_text(text.replace("steps = 6\n", "steps = 30\n"))
    row = read_facts(directory.path).row
    assert row.steps == 6
    (problem,) = row.problems
    assert "run.toml was changed after the run was started: train.steps = 30, and the run has 6" in problem


def test_the_newest_start_is_found_among_many(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=6000, attempts=8)  # more bytes than are read from either end
    assert (tmp_path / "a" / "events.jsonl").stat().st_size > 1 << 20
    (row,) = rows(tmp_path, tmp_path / "cache")
    assert (row.ranks, row.step) == (2 + 7, 6000)


@pytest.mark.parametrize(
    ("ending", "state"), [("stopped", "stopped"), ("", "failed"), ("finished", "finished")]
)
def test_a_run_that_nobody_holds_has_ended_as_its_events_record_or_failed(
    tmp_path: Path, ending: str, state: str
) -> None:
    make_run(tmp_path / "a", steps=3, of=6, ending=ending)
    assert rows(tmp_path, tmp_path / "cache")[0].state == state


def test_a_run_whose_directory_is_locked_is_running_and_silent_after_a_long_time(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="")
    with directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        assert KernelLocks().holds(directory) is True
        assert rows(tmp_path, tmp_path / "cache")[0].state == "running"
        assert row_of(read_facts(directory.path), True, time.time() + 3600).state == "silent"
    assert KernelLocks().holds(directory) is False
    assert rows(tmp_path, tmp_path / "cache")[0].state == "failed"


def test_the_age_of_its_events_decides_the_state_of_a_run_on_another_machine(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="")
    directory.lock.write_text("process 1 on elsewhere\n")
    assert KernelLocks().holds(directory) is None
    facts = read_facts(directory.path)
    assert row_of(facts, None, time.time()).state == "running"
    assert row_of(facts, None, time.time() + 3600).state == "silent"


def test_a_run_that_has_not_begun_waits(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3)
    for file in (directory.events, directory.record, directory.result):
        file.unlink()
    assert rows(tmp_path, tmp_path / "cache")[0].state == "waiting"


def test_a_start_that_ended_before_its_first_event_has_failed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3)
    for file in (directory.events, directory.result):
        file.unlink()
    assert rows(tmp_path, tmp_path / "cache")[0].state == "failed"


def test_a_start_after_an_ending_is_not_over(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="stopped")
    with EventLog(directory.events, 1) as log:
        log.append(RunStarted("a", 6, ranks=5))
    facts = read_facts(directory.path)
    assert (facts.ended, facts.row.ranks, facts.row.step) == ("", 5, 3)


def test_changes_are_seen_through_the_cache(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=3, of=6, ending="stopped")
    before = rows(tmp_path, tmp_path / "cache")
    write_labels(tmp_path / "a", RunLabels(("new",)))
    (after,) = rows(tmp_path, tmp_path / "cache")
    assert after == replace(before[0], tags=("new",))


def test_a_row_from_the_cache_is_the_row_that_was_read(tmp_path: Path) -> None:
    make_run(tmp_path / "a", losses={6: float("nan")}, ending="stopped", lineage=(_origin(tmp_path / "p"),))
    fresh, cached = rows(tmp_path, tmp_path / "cache"), rows(tmp_path, tmp_path / "cache")
    assert repr(fresh) == repr(cached)  # NaN, which is not equal to itself, among them
    assert (tmp_path / "cache").exists()


def _origin(path: Path) -> dict[str, object]:
    return {
        "run_dir": str(path),
        "identity": "x",
        "step": 3,
        "weights_sha256": "cd" * 32,
        "init_with": "training",
    }


@pytest.mark.parametrize("damage", ["deleted", "garbage", "another schema", "torn"])
def test_the_cache_may_be_lost_or_damaged_and_nothing_else_is(tmp_path: Path, damage: str) -> None:
    make_run(tmp_path / "runs" / "a")
    cache = tmp_path / "cache"
    before = rows(tmp_path / "runs", cache)
    for name in ("cache-wal", "cache-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    if damage == "deleted":
        cache.unlink()
    elif damage == "garbage":
        cache.write_bytes(os.urandom(8192))
    elif damage == "torn":
        cache.write_bytes(cache.read_bytes()[:5000])
    else:
        cache.unlink()
        with sqlite3.connect(cache) as base:
            base.execute("CREATE TABLE runs (path INTEGER)")
    assert rows(tmp_path / "runs", cache) == before
    assert rows(tmp_path / "runs", cache) == before


def test_a_place_where_nothing_can_be_written_is_no_obstacle(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("")
    (row,) = rows(tmp_path / "runs", tmp_path / "file" / "cache")
    assert row.name == "a"


def test_two_processes_may_use_one_cache(tmp_path: Path) -> None:
    for name in "abcd":
        make_run(tmp_path / "runs" / name)
    code = (
        "import sys; from pathlib import Path; from phalanx_watch.runs.index import RunIndex\n"
        "for _ in range(20):\n"
        "    for name in 'abcd': (Path(sys.argv[1]) / name / 'labels.json').touch()\n"
        "    assert len(RunIndex([Path(sys.argv[1])], Path(sys.argv[2])).rows()) == 4\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "runs"), str(tmp_path / "cache")]
    running = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in running] == [("", 0), ("", 0)]


def test_damaged_files_are_named_and_the_run_is_listed_all_the_same(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a")
    directory.record.write_text("{")
    directory.run_file.write_text("= [")
    (tmp_path / "a" / "fleet.json").write_bytes(b"\xff")
    directory.events.write_bytes(b"\x00" * 100 + directory.events.read_bytes() + b'{"t":')
    (row,) = rows(tmp_path, tmp_path / "cache")
    assert row.name == "a"
    assert len(row.problems) == 3
    assert row.step == 6


def test_files_that_are_made_to_break_readers_break_nothing(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", ending="stopped")
    deep = b'{"a":' * 100_000
    for file in (directory.record, directory.result, directory.labels, tmp_path / "a" / "fleet.json"):
        file.write_bytes(deep)
    directory.run_file.write_bytes(b"a = " + b"[" * 100_000)
    directory.events.write_bytes(directory.events.read_bytes() + deep + b"\n")
    (row,) = rows(tmp_path, tmp_path / "cache")
    assert (row.step, row.state) == (6, "stopped")


def test_a_fleet_whose_coordinator_moved_to_another_machine_is_running(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="")
    now = time.time()
    (tmp_path / "a" / "fleet.json").write_text(f'{{"phase": "running", "written_unix_s": {now}}}')
    facts = read_facts(directory.path)
    assert row_of(facts, False, now).state == "running"
    assert row_of(facts, False, now + 60).state == "failed"


def test_a_line_without_an_end_is_not_read_as_a_whole(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", ending="stopped")
    with directory.events.open("ab") as file:
        file.write(b"x" * (8 << 20))
    (row,) = rows(tmp_path, tmp_path / "cache")
    assert row.steps == 6


def test_looking_takes_no_lock_and_writes_nothing_into_a_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs" / "a")
    directory.lock.write_text("process 1 on elsewhere\n")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    rows(tmp_path / "runs", tmp_path / "cache")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_a_run_vanishing_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    assert read_facts(tmp_path / "gone").row.problems
    assert RunDirectory(tmp_path / "gone").path.exists() is False
    assert rows(tmp_path / "nowhere", tmp_path / "cache") == []


def test_runs_that_are_no_more_are_forgotten_by_the_cache_within_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    cache, noon = tmp_path / "cache", time.time() // 86_400 * 86_400 + 43_200
    monkeypatch.setattr("phalanx_watch.runs.index.time.time", lambda: noon)

    def cached_names() -> list[str]:
        with sqlite3.connect(cache) as base:
            return [Path(path).name for (path,) in base.execute("SELECT path FROM runs ORDER BY path")]

    rows(tmp_path / "runs", cache)
    shutil.rmtree(tmp_path / "runs" / "a")
    write_labels(tmp_path / "runs" / "b", RunLabels(("new",), ""))
    rows(tmp_path / "runs", cache)
    assert cached_names() == ["a", "b"]  # the look at every path it knows is made once a day
    monkeypatch.setattr("phalanx_watch.runs.index.time.time", lambda: noon + 86_400)
    write_labels(tmp_path / "runs" / "b", RunLabels(("newer",), ""))
    rows(tmp_path / "runs", cache)
    assert cached_names() == ["b"]


def test_runs_on_a_disk_that_is_away_are_neither_forgotten_nor_looked_up_when_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "away"):
        make_run(tmp_path / folder / "a")
    cache, now = tmp_path / "cache", time.time()
    for folder in ("here", "away"):
        rows(tmp_path / folder, cache)
    (tmp_path / "away").rename(tmp_path / "unmounted")
    monkeypatch.setattr("phalanx_watch.runs.index.time.time", lambda: now + 86_400)
    looked_up: list[str] = []
    really = os.path.isdir
    monkeypatch.setattr(
        "phalanx_watch.runs.index.os.path.isdir", lambda path: looked_up.append(path) or really(path)
    )
    write_labels(tmp_path / "here" / "a", RunLabels(("new",), ""))
    rows(tmp_path / "here", cache)
    with sqlite3.connect(cache) as base:
        cached_paths = {path for (path,) in base.execute("SELECT path FROM runs")}
    assert cached_paths == {str(tmp_path / folder / "a") for folder in ("here", "away")}
    assert not [path for path in looked_up if "away" in str(path)]


def test_a_submitted_run_that_has_not_begun_is_listed_and_one_that_died_at_its_start_has_failed(
    tmp_path: Path,
) -> None:
    run = tmp_path / "runs" / "a"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "run.toml").write_text('name = "mine"\n[train]\nsteps = 70\n')
    index = RunIndex([tmp_path / "runs"], tmp_path / "cache")
    (row,) = index.rows()
    assert (row.name, row.state, row.steps, row.problems) == ("mine", "waiting", 70, ())
    (run / "launch" / "lead-exit").write_text("1\n")
    assert [row.state for row in index.rows()] == ["failed"]
    (run / "launch" / "run.toml").write_text('name = "mine"\n[train]\nsteps = 80\n')  # it is submitted again
    os.utime(run / "launch" / "lead-exit", (0, 0))
    assert [row.state for row in index.rows()] == ["waiting"]
    (run / "logs").mkdir()
    report_failure(RunFailedError("no such data", "data.path"), RunDirectory(run).log(0, 0), 0, 0)
    (row,) = index.rows()
    assert row.state == "failed"

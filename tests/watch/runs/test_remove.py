"""A run is removed whole, and not while others need it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.run.directory.paths import RunDirectoryError
from phalanx.train.start.open_run import take_lock
from phalanx_watch.runs.index import RunIndex, removal, remove
from watch.runs.some_runs import make_run


def test_what_would_be_lost_is_measured_and_then_gone(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a")
    (directory.path / "checkpoints").mkdir()
    (directory.path / "checkpoints" / "big").write_bytes(b"x" * 100_000)
    plan = removal(directory.path, [])
    assert plan.largest[0] == ("checkpoints", 100_000)
    assert plan.size_bytes == sum(file.stat().st_size for file in directory.path.rglob("*") if file.is_file())
    assert plan.obstacles == ()
    remove(directory.path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_being_trained_is_not_removed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="")
    lock = take_lock(directory.lock)
    try:
        with pytest.raises(RunDirectoryError, match=r"is being trained by process \d+ on"):
            removal(directory.path, [])
        with pytest.raises(RunDirectoryError, match="is being trained"):
            remove(directory.path)
    finally:
        os.close(lock)
    assert directory.events.exists()


def test_a_look_leaves_the_lock_file_as_it_was(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a")
    directory.lock.write_text("process 1 on elsewhere\n")
    removal(directory.path, [])
    assert directory.lock.read_text() == "process 1 on elsewhere\n"


def test_runs_that_continue_from_its_checkpoints_are_named(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    origin = {
        "run_dir": str(parent.path),
        "identity": "x",
        "step": 3,
        "weights_sha256": "cd" * 32,
        "init_with": "training",
    }
    make_run(tmp_path / "child", lineage=(origin,))
    make_run(
        tmp_path / "other" / "grandchild", lineage=(origin, {**origin, "run_dir": str(tmp_path / "child")})
    )
    (obstacle,) = removal(parent.path, [tmp_path / "other"]).obstacles
    assert "child" in obstacle
    assert "grandchild" in obstacle
    assert removal(tmp_path / "child", []).obstacles == ()
    assert removal(parent.path, [], together=[tmp_path / "child"]).obstacles == ()


def test_what_is_no_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        removal(tmp_path, [])
    make_run(tmp_path / "runs" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "a")
    with pytest.raises(RunDirectoryError, match="is a link to"):
        removal(tmp_path / "link", [])


def test_a_run_that_may_be_running_on_another_machine_is_removed_only_by_force(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", steps=3, of=6, ending="")
    directory.lock.write_text("process 1 on elsewhere\n")
    (obstacle,) = removal(directory.path, []).obstacles
    assert "may be running on another machine" in obstacle


def test_a_run_is_removed_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run(tmp_path / "a")
    monkeypatch.chdir(directory.path)
    remove(Path(removal(Path("."), []).row.path))
    assert list(tmp_path.iterdir()) == []


def test_runs_in_its_folder_are_named_and_one_of_them_that_is_trained_prevents_the_removal(
    tmp_path: Path,
) -> None:
    outer, inner = make_run(tmp_path / "a"), make_run(tmp_path / "a" / "b")
    assert removal(outer.path, []).obstacles == (
        f"other runs are in it, and would be removed too: {inner.path}",
    )
    lock = take_lock(inner.lock)
    try:
        with pytest.raises(RunDirectoryError, match="b is being trained by"):
            removal(outer.path, [])
    finally:
        os.close(lock)


def test_what_a_kill_has_left_of_a_removal_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run(tmp_path / "a")
    monkeypatch.setattr("shutil.rmtree", lambda _path: None)
    remove(directory.path)
    assert len(list(tmp_path.iterdir())) == 1
    assert RunIndex([tmp_path], tmp_path / "cache").rows() == []

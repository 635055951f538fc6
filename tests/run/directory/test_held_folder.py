"""A temporary folder goes with its process, and nobody takes one that is in use."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.run.directory.files import held_folder

PREFIX = "phalanx-tried-"
HOLDER = f"""
import sys, time
from phalanx.run.directory.files import held_folder
with held_folder("{PREFIX}") as folder:
    (folder / "file").write_text("kept")
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_folder_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    with held_folder(PREFIX) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_process_is_left_alone_until_it_is_killed_and_then_taken_by_the_next(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with held_folder(PREFIX), held_folder(PREFIX):
            assert (theirs / "file").read_text() == "kept"
        other.kill()
        other.wait()
        assert theirs.is_dir()
        with held_folder(PREFIX) as ours:
            assert list(tmp_path.iterdir()) == [ours]


def test_folders_and_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "phalanx-other-1").mkdir()
    (tmp_path / f"{PREFIX}file").write_text("")
    with held_folder(PREFIX):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"phalanx-other-1", f"{PREFIX}file"}


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_folders_have_no_locks_one_is_made_and_nobody_sweeps_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, how: int) -> None:  # noqa: ARG001
        assert len(list(tmp_path.iterdir())) <= 2, "it is made again and again"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    with held_folder(PREFIX) as first:
        (first / "file").write_text("kept")
        with held_folder(PREFIX) as second:
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
            assert (first / "file").read_text() == "kept"
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_descriptors_gets_an_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = os.open

    def none_left(path: object, flags: int, *more: object, **named: object) -> int:
        assert len(list(tmp_path.iterdir())) <= 1, "it is made again and again"
        if isinstance(path, Path) and path.name.startswith(PREFIX):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return taken(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", none_left)
    with pytest.raises(OSError, match="Too many open files"), held_folder(PREFIX):
        raise AssertionError("it cannot be held")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_beside_its_target_has_the_permissions_of_others_there_and_may_be_renamed(
    tmp_path: Path,
) -> None:
    (tmp_path / "usual").mkdir()
    with held_folder(PREFIX, tmp_path) as folder:
        assert folder.stat().st_mode == (tmp_path / "usual").stat().st_mode
        (folder / "file").write_text("kept")
        folder.rename(tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "kept"

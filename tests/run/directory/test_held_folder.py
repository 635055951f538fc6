"""A temporary folder goes with its process, and nobody takes one that is in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.run.directory.held_folder import held_folder

PREFIX = "phalanx-tried-"
HOLDER = f"""
import sys, time
from phalanx.run.directory.held_folder import held_folder
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

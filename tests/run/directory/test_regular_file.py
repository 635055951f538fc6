"""Files that another program has put into a run directory or dataset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.data.errors import DatasetError
from phalanx.data.stored.index import INDEX_FILE, read_index
from phalanx.observe.logs.read_blocks import streams
from phalanx.run.directory.files import leads_out, open_regular, read_small
from phalanx.run.directory.paths import RunDirectory


@pytest.fixture
def private(tmp_path: Path) -> Path:
    file = tmp_path / "private.txt"
    file.write_text("a secret")
    return file


def test_a_link_is_not_followed_unless_it_was_named(tmp_path: Path, private: Path) -> None:
    link = tmp_path / "result.json"
    link.symlink_to(private)
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        open_regular(link)
    assert read_small(link, follow=True) == b"a secret"


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for follow in (False, True):
        with pytest.raises(OSError, match="it is no file"):
            open_regular(tmp_path / "pipe", follow=follow)


def test_a_pipe_in_the_place_of_a_datasets_index_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_FILE)
    with pytest.raises(DatasetError, match="it is no file"):
        read_index(tmp_path)


def test_a_file_in_the_place_of_a_dataset_is_named_with_the_command_that_prepares_it(private: Path) -> None:
    with pytest.raises(DatasetError, match=rf"{private} is a file.*phalanx data prepare {private} --out DIR"):
        read_index(private)


def test_logs_behind_a_linked_folder_are_none_of_the_runs(tmp_path: Path, private: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (elsewhere / "attempt-000-rank-00000.log").write_text(private.read_text())
    (run / "logs").symlink_to(elsewhere)
    assert leads_out(run / "logs", run)
    assert streams(RunDirectory(run)) == []
    (tmp_path / "linked run").symlink_to(run)
    (run / "logs").unlink()
    (run / "logs").mkdir()
    (run / "logs" / "attempt-000-rank-00000.log").write_text("a line")
    assert len(streams(RunDirectory(tmp_path / "linked run"))) == 1, "a run directory may be a link itself"

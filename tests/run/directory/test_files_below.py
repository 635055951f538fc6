"""Walking a folder that others change."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.run.directory.files import files_below, folders_below

names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@settings(max_examples=25)
@given(names=st.sets(names))
def test_every_file_and_folder_is_found_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "file").touch()
    assert sorted(files_below(root)) == sorted(path for path in root.rglob("*") if path.is_file())
    assert sorted(folders_below(root)) == [root, *sorted(path for path in root.rglob("*") if path.is_dir())]


def test_a_folder_that_goes_while_it_is_walked_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    (tmp_path / "gone").mkdir()
    (tmp_path / "stays").mkdir()
    (tmp_path / "stays" / "second").touch()
    walk = files_below(tmp_path)
    assert next(walk) == tmp_path / "first"
    (tmp_path / "gone").rmdir()
    assert list(walk) == [tmp_path / "stays" / "second"]


def test_a_folder_that_is_not_there_holds_no_files(tmp_path: Path) -> None:
    assert list(files_below(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("number", "is_gone"), [(errno.EIO, False), (errno.ESTALE, False), (errno.EACCES, True)]
)
def test_files_of_a_folder_that_a_faulty_disk_does_not_list_are_not_left_out_in_silence(
    number: int, is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").touch()
    (tmp_path / "faulty").mkdir()
    lists = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("faulty"):
            raise OSError(number, os.strerror(number), path)
        return lists(path)

    monkeypatch.setattr(os, "scandir", scandir)
    walk = files_below(tmp_path)
    assert next(walk) == tmp_path / "first"
    if is_gone:
        assert list(walk) == []
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            list(walk)

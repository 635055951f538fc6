"""Rank 0's look-out for requests: cheap, and aloud about what it ignores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.observe.profile_request import ProfileDesk, ProfileRequest, request_path, write_request
from phalanx.run.directory.paths import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def leave_request(directory: RunDirectory, until_s: float) -> ProfileRequest:
    request = ProfileRequest("a", 1, "auto", until_s)
    write_request(directory, request)
    return request


def test_a_request_is_taken_once_and_its_file_goes(directory: RunDirectory) -> None:
    warnings: list[str] = []
    desk = ProfileDesk(directory, warnings.append, look_pause_s=0.0)
    assert not desk.pending()
    request = leave_request(directory, time.time() + 60)
    assert desk.pending()
    assert desk.pending()
    assert not request_path(directory).exists()
    assert desk.take() == request
    assert not desk.pending()
    assert warnings == []


def test_a_stale_request_and_a_link_are_ignored_aloud_and_once(directory: RunDirectory) -> None:
    warnings: list[str] = []
    desk = ProfileDesk(directory, warnings.append, look_pause_s=0.0)
    leave_request(directory, time.time() - 1)
    assert not desk.pending()
    assert not desk.pending()
    request_path(directory).symlink_to("/etc/passwd")
    assert not desk.pending()
    assert not desk.pending()
    assert len(warnings) == 2
    assert "stale" in warnings[0]
    assert Path("/etc/passwd").exists()


def test_a_file_with_the_inode_and_the_time_of_one_that_was_removed_is_read_too(
    directory: RunDirectory, tmp_path: Path
) -> None:
    warnings: list[str] = []
    desk = ProfileDesk(directory, warnings.append, look_pause_s=0.0)
    leave_request(directory, time.time() - 1)
    os.link(request_path(directory), tmp_path / "kept")  # a file system may give the next file both
    assert not desk.pending()
    os.link(tmp_path / "kept", request_path(directory))
    assert not desk.pending()
    assert len(warnings) == 2
    assert not request_path(directory).exists()


def test_what_cannot_be_removed_is_reported_once_too(directory: RunDirectory) -> None:
    warnings: list[str] = []
    desk = ProfileDesk(directory, warnings.append, look_pause_s=0.0)
    request_path(directory).mkdir(parents=True)
    for _ in range(3):
        assert not desk.pending()
    assert len(warnings) == 1


def test_the_disk_is_read_once_in_a_pause_at_most(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    real = os.lstat

    def lstat(path: object, **kwargs: object) -> os.stat_result:
        if path == request_path(directory):  # other threads of this process look at other files
            looks.append(path)
        return real(path, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "stat", lambda path, **kwargs: lstat(path))  # noqa: ARG005
    desk = ProfileDesk(directory, lambda _: None, look_pause_s=3600.0)
    for _ in range(1000):
        desk.pending()
    assert len(looks) == 1

"""The outcome of a request for a profile is reported to the user who made it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phalanx.observe import profile_request
from phalanx.observe.profile_request import ProfileRequest, request_path, write_request
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.profile import read
from phalanx_watch.profile.read import ProfileError
from recorded_runs import RecordedRun


def _request(directory: RunDirectory, wait_s: float) -> str:
    return read.request_profile(directory, 1, "auto", wait_s, lambda _line: None)


def test_a_request_that_is_taken_at_once_is_no_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "a", "a", 10)

    def written_and_taken(directory: RunDirectory, request: ProfileRequest) -> None:
        write_request(directory, request)
        request_path(directory).unlink()

    monkeypatch.setattr(profile_request, "write_request", written_and_taken)
    with pytest.raises(ProfileError, match="did not take the request"):
        _request(run.directory, 0.3)


def test_a_request_that_another_has_replaced_fails_at_once(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "a", "a", 10)

    def another(_line: str) -> None:  # called between the request and the first look for an answer
        write_request(run.directory, ProfileRequest("other", 1, "auto", time.time() + 60))

    with pytest.raises(ProfileError, match="another profile was requested"):
        read.request_profile(run.directory, 1, "auto", 0.0, another)
    assert request_path(run.directory).exists()


def test_a_run_that_was_killed_a_moment_ago_is_not_reported_as_slow_and_not_waited_for(
    tmp_path: Path,
) -> None:
    run = RecordedRun(tmp_path / "a", "a", 10, began=time.time() - 10)
    run.train(3)
    with pytest.raises(ProfileError, match=r"within 2 s.*it seems not to run"):
        _request(run.directory, 600.0)

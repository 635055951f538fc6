"""A request for a profile: read as it was written, and refused when it is stale, strange or hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.profile_request import (
    MOST_RANKS,
    MOST_STEPS,
    ProfileRequest,
    ProfileRequestError,
    is_profile_name,
    new_name,
    read_request,
    request_path,
    write_request,
)
from phalanx.run.directory.paths import RunDirectory

NOW_S = 1e9
GOOD = {"name": "a-1", "steps": 2, "ranks": "auto", "until_unix_s": NOW_S + 60}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run_directory = RunDirectory(tmp_path)
    run_directory.profiles.mkdir()
    return run_directory


@pytest.mark.parametrize("ranks", ["auto", "all", (0, 3)])
def test_a_request_is_read_as_it_was_written(directory: RunDirectory, ranks: Any) -> None:
    request = ProfileRequest(new_name(NOW_S), 3, ranks, NOW_S + 5)
    write_request(directory, request)
    assert read_request(directory, NOW_S) == request


def test_a_new_name_is_a_name_that_no_other_has() -> None:
    names = {new_name(NOW_S) for _ in range(20)}
    assert len(names) > 1
    assert all(map(is_profile_name, names))


@pytest.mark.parametrize(
    "wrong",
    [
        {"until_unix_s": NOW_S - 1},
        {"until_unix_s": NOW_S + 1e6},
        {"until_unix_s": float("inf")},
        {"until_unix_s": True},
        {"name": "../../etc"},
        {"name": ""},
        {"name": "a" * 65},
        {"name": 7},
        {"steps": 0},
        {"steps": MOST_STEPS + 1},
        {"steps": True},
        {"steps": 1.5},
        {"ranks": []},
        {"ranks": [-1]},
        {"ranks": ["0"]},
        {"ranks": list(range(MOST_RANKS + 1))},
        {"ranks": "some"},
        {"more": 1},
    ],
)
def test_what_is_stale_or_out_of_bounds_is_refused(directory: RunDirectory, wrong: dict[str, Any]) -> None:
    request_path(directory).write_text(json.dumps({**GOOD, **wrong}))
    with pytest.raises(ProfileRequestError):
        read_request(directory, NOW_S)


@given(content=st.binary(max_size=300))
def test_any_other_bytes_are_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    directory.profiles.mkdir()
    request_path(directory).write_bytes(content)
    with pytest.raises(ProfileRequestError):
        read_request(directory, NOW_S)


@pytest.mark.parametrize("content", [b"[" * 20_000, b" " * (1 << 20), b"[" * 9_000])
def test_what_is_too_long_or_too_deep_is_refused(directory: RunDirectory, content: bytes) -> None:
    request_path(directory).write_bytes(content)
    with pytest.raises(ProfileRequestError):
        read_request(directory, NOW_S)


def test_neither_a_link_nor_a_pipe_nor_a_folder_is_read(directory: RunDirectory, tmp_path: Path) -> None:
    path = request_path(directory)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(GOOD))
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        read_request(directory, NOW_S)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ProfileRequestError, match="regular"):
        read_request(directory, NOW_S)
    path.unlink()
    path.mkdir()
    with pytest.raises(ProfileRequestError, match="regular"):
        read_request(directory, NOW_S)

"""A profile that does not exist is reported with those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.profile.read import ProfileError, read_summary


def test_a_profile_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(
        ProfileError, match=r"run has no profile x; none was recorded: phalanx profile \S+run does"
    ):
        read_summary(directory, "x")
    for name in ("a", "b"):
        (directory.profiles / name).mkdir(parents=True)
    with pytest.raises(ProfileError, match=r"run has no profile x; there are a, b"):
        read_summary(directory, "x")
    with pytest.raises(
        ProfileError, match=r"profile a of \S+run has no summary.json: it was not recorded to its end"
    ):
        read_summary(directory, "a")
    with pytest.raises(
        ProfileError, match=r"'No!' cannot be the name of a profile; phalanx profile \S+run --show lists"
    ):
        read_summary(directory, "No!")

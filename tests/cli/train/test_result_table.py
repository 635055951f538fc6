"""The table at the end of a run tells what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.train.session import page_command
from phalanx.run.directory.paths import RunDirectory


def test_the_page_over_the_runs_beside_this_one_is_the_next_thing_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert page_command(RunDirectory(Path("runs/quickstart")), ["phalanx"]) == "phalanx ui"
    assert (
        page_command(RunDirectory(tmp_path / "runs" / "x"), [".venv/bin/phalanx"]) == ".venv/bin/phalanx ui"
    )
    assert page_command(RunDirectory(Path("/data/my runs/x")), ["phalanx"]) == "phalanx ui '/data/my runs'"

"""A writer killed at any moment leaves the old set of committed steps, or that and one more, all whole."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from forked_python import in_place_of_execution
from store.servers import Server


def kill_often(folder: Path, kills: int, store: str, environment: Mapping[str, str]) -> str:
    """Output of the program after so many kills of a writer in ``folder`` whose checkpoints are copied to ``store``."""
    program = Path(__file__).with_name("crash_program.py")
    root = Path(__file__).parents[3]
    with in_place_of_execution():
        done = subprocess.run(
            [sys.executable, program, folder, str(kills), "1", *([store] if store else [])],
            env={**os.environ, **environment, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "store", ["", pytest.param("store", marks=pytest.mark.slow)], ids=["on disk", "copied to a store"]
)
def test_a_kill_at_any_moment_leaves_only_whole_steps_and_loses_none(tmp_path: Path, store: str) -> None:
    output = kill_often(tmp_path / "disk", 12, str(tmp_path / store) if store else "", {})
    assert int(output.split()[2]) >= 6, "a kill after a commit lost it"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills_in_saves_uploads_and_deletions_leave_no_step_in_a_real_store_that_does_not_load(
    tmp_path: Path, s3_server: Server
) -> None:
    url = s3_server.url(secrets.token_hex(8))
    output = kill_often(tmp_path / "disk", 200, url, s3_server.environment)
    assert int(output.split()[2]) >= 100, "a kill after a commit lost it"
    kills_by_work = {work: int(times) for times, work in re.findall(r"(\d+) in (\w+)", output)}
    assert min(kills_by_work[work] for work in ("save", "upload", "deletion")) >= 5, output

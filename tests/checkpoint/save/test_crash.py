"""A writer killed at any moment leaves the old set of committed steps, or that and one more, all whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("store", ["", "store"], ids=["on disk", "copied to a store"])
def test_a_kill_at_any_moment_leaves_only_whole_steps_and_loses_none(tmp_path: Path, store: str) -> None:
    program = Path(__file__).with_name("crash_program.py")
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, program, tmp_path / "disk", "25", "1", *([tmp_path / store] if store else [])],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[2]) >= 12, "a kill after a commit lost it"

"""A failure from which the run has recovered is distinguished from the one that ended it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.main import phalanx_command
from phalanx.observe.logs.line import ended_text
from phalanx.observe.logs.read_lines import first_logged_failure, recovered_step
from recorded_runs import RecordedRun


@pytest.mark.parametrize(("more", "step"), [(0, None), (41, 61)])
def test_a_failure_is_recovered_from_once_later_steps_are_done(
    tmp_path: Path, more: int, step: int | None
) -> None:
    run = RecordedRun(tmp_path / "a", "a", 100)
    run.train(20)
    run.log_lines(1, [ended_text("was killed by SIGKILL")], "error")
    run.train(more)
    failure = first_logged_failure(run.directory)
    assert failure is not None
    assert recovered_step(run.directory, failure.line) == step
    head = CliRunner().invoke(phalanx_command, ["logs", str(run.directory.path)]).stderr.splitlines()[0]
    assert ("recovered: step 61 was reached since" in head) == bool(step)

"""``phalanx why`` as a user and a program see it."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx_process import run
from watch.why.watched import Watched, steps


def test_nothing_wrong_is_printed_and_is_exit_code_0(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "record.json").write_text("{}")
    done = run(["why", "empty"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "nothing is wrong with empty\n")


def test_a_run_that_is_gone_is_exit_code_2_and_printed_with_the_next_command(tmp_path: Path) -> None:
    Watched(tmp_path / "run").write(steps(1, 5))
    done = run(["why", "run"], tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("critical  The run's processes are gone, without a word  [gone]\n")
    assert "next    phalanx train run" in done.stdout


def test_programs_get_the_reasons_as_json(tmp_path: Path) -> None:
    Watched(tmp_path / "run").write(steps(1, 5))
    (reason,) = json.loads(run(["why", "run", "--json"], tmp_path).stdout)["reasons"]
    assert set(reason) == {"code", "severity", "title", "where", "since", "evidence", "doing", "next"}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = run(["why", "."], tmp_path)
    assert done.returncode == 2
    assert "is no run directory" in done.stderr


def test_what_strangers_wrote_does_not_reach_the_terminal(tmp_path: Path) -> None:
    from phalanx.observe.events import CheckpointFailed

    watched = Watched(tmp_path / "run")
    watched.write([*steps(1, 5), CheckpointFailed(5, "c", "\x1b[2Jgone\nfaked line")])
    done = run(["why", "run"], tmp_path)
    assert "\x1b[2J" not in done.stdout
    assert "gone faked line" in done.stdout

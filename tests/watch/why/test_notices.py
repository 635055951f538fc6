"""A command is called for each reason that begins, and for its end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx_watch.cli import why_command
from phalanx_watch.cli.why_command import NoticeCommand
from phalanx_watch.why.observed import Reason
from watch.why.test_ends_and_divergence import VOCABULARY
from watch.why.watched import Watched, steps

SLOW = Reason(
    code="slow-data",
    title="Training waits",
    where="rank 0",
    since=5.0,
    evidence=("half of the time",),
    doing="nothing",
    next="look",
)
DISK = dataclasses.replace(SLOW, code="disk-full", severity="critical", title='Disk "full"', where="/runs")


def delivered(file: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(row["state"], row["reason"]["code"]) for row in rows]


def test_each_reason_is_delivered_once_when_it_begins_and_once_when_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "notices"
    notices = NoticeCommand(f"cat >> {file}; echo >> {file}", "run", pytest.fail)
    for reasons in ([SLOW], [SLOW], [SLOW, DISK], [dataclasses.replace(DISK, evidence=("more",))], []):
        notices.update(reasons, 10.0)
    assert delivered(file) == [
        ("begins", "slow-data"),
        ("begins", "disk-full"),
        ("ends", "slow-data"),
        ("ends", "disk-full"),
    ]


def test_the_command_has_the_facts_as_variables_that_no_shell_reads_again(tmp_path: Path) -> None:
    file = tmp_path / "notices"
    names = ("RUN", "STATE", "CODE", "SEVERITY", "TITLE")
    words = " ".join(f'"$PHALANX_{name}"' for name in names)
    hostile = dataclasses.replace(DISK, title="$(touch hacked) `id` ; |")
    NoticeCommand(f"printf '%s\\n' {words} > {file}", "runs/a b", pytest.fail).update([hostile], 10.0)
    assert file.read_text().splitlines() == ["runs/a b", "begins", "disk-full", "critical", hostile.title]


def test_a_command_that_fails_is_called_again_and_given_up_after_three_times(tmp_path: Path) -> None:
    warnings: list[str] = []
    notices = NoticeCommand(f"echo called >> {tmp_path}/calls; exit 7", "run", warnings.append)
    for _ in range(5):
        notices.update([SLOW], 10.0)
    # The command is taken to know of a reason that it was given three times.
    assert (tmp_path / "calls").read_text().splitlines() == ["called"] * 3
    assert len(warnings) == 3
    assert all("code 7" in warning for warning in warnings)
    assert "given up" in warnings[-1]


def test_a_reason_that_ends_before_it_is_delivered_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "notices"
    notices = NoticeCommand(
        f"test -e {tmp_path}/ready && cat >> {file} && echo >> {file}", "run", lambda _: None
    )
    notices.update([SLOW], 10.0)
    notices.update([], 10.0)
    (tmp_path / "ready").touch()
    notices.update([], 10.0)
    assert delivered(file) == []
    notices.update([dataclasses.replace(SLOW, title="with \0 in it")], 10.0)
    assert delivered(file) == [("begins", "slow-data")]


def test_exec_without_watch_is_a_mistake(tmp_path: Path) -> None:
    done = CliRunner().invoke(why_command.command, [str(tmp_path), "--exec", "true"])
    assert done.exit_code == 2
    assert "--watch" in done.output


def test_an_empty_command_is_a_mistake(tmp_path: Path) -> None:
    done = CliRunner().invoke(why_command.command, [str(tmp_path), "--watch", "--exec", " "])
    assert done.exit_code == 2
    assert "the command is empty" in done.output


def test_the_command_of_a_watched_run_is_called_while_the_run_is_watched(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", VOCABULARY)
    watched.write(steps(1, 60, lambda number: {"loss": 2.0 if number < 30 else 3900.0}))
    file = tmp_path / "notices"
    words = [
        "-m",
        "phalanx",
        "why",
        "--watch",
        str(tmp_path / "run"),
        "--exec",
        f"cat >> {file}; echo >> {file}",
    ]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) as process:
        while ("begins", "diverged") not in delivered(file):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.wait()

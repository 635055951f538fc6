"""The coordinator finds out which rank failed first from the logs in the run directory, whoever reported first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phalanx.fleet.control.inquiry import FailureInquiry
from phalanx.fleet.core import messages as m
from phalanx.observe.logs.line import LogLine, encode, ended_text
from phalanx.run.directory.paths import RunDirectory

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29574"


def made(tmp_path: Path, last_lines: dict[str, str]) -> FailureInquiry:
    """An inquiry in a run whose workers have just logged ``last_lines``: node -> text."""
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    for number, (node, text) in enumerate(last_lines.items()):
        line = LogLine(time.time(), "error", node, number, 4, 0, 7, text, f"{node}-0")
        path = directory.named_log(0, f"{node}-0")
        path.with_name(f"{path.stem}.out.jsonl" if text.startswith("its process") else path.name).write_bytes(
            encode(line)
        )
    return FailureInquiry(directory, 0, 1)


def test_a_worker_that_was_killed_is_named_and_those_that_lost_it_are_not(tmp_path: Path) -> None:
    inquiry = made(tmp_path, {"node-0": LOST, "node-1": ended_text("was killed by SIGKILL"), "node-2": LOST})
    inquiry.add(m.Broken("node-0", 1, 4, 0, LOST))
    inquiry.add(m.Broken("node-2", 1, 4, 0, LOST))
    inquiry.add(m.WorkerExited("node-1", 1, 4, 0, -9))
    finding = inquiry.finding(inquiry.take())
    assert finding.startswith("first failure: rank 1 on node-1: its process was killed by SIGKILL (")
    assert "2 failed because another process had: rank 0 on node-0, rank 2 on node-2" in finding
    assert not inquiry.take()


def test_ranks_that_left_on_request_have_not_failed(tmp_path: Path) -> None:
    inquiry = made(tmp_path, {})
    inquiry.add(m.Broken("node-0", 1, 4, 0, m.LEFT_AS_ASKED))
    assert not inquiry.take()


def test_of_a_node_whose_log_cannot_be_read_its_report_counts(tmp_path: Path) -> None:
    inquiry = made(tmp_path, {"node-0": LOST})
    inquiry.add(m.Broken("node-0", 1, 4, 0, LOST))
    inquiry.add(m.Fatal(4, "node-9", "no blocks are left", "DataError"))
    finding = inquiry.finding(inquiry.take())
    assert finding.startswith("first failure: node-9: error: no blocks are left (")


def test_an_error_that_ended_no_epoch_hours_ago_is_not_the_cause_of_a_failure_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inquiry = made(tmp_path, {})
    hours_ago = time.time() - 7200
    with monkeypatch.context() as past:
        past.setattr(time, "time", lambda: hours_ago)
        inquiry.add(m.WorkerExited("node-9", 1, 0, 0, 1, "a spare's worker had no room on /tmp"))
    inquiry.add(m.Fatal(4, "node-9", "no blocks are left", "DataError"))
    inquiry.add(m.Broken("node-1", 1, 4, 0, LOST))
    assert inquiry.finding(inquiry.take()).startswith("first failure: node-9: error: no blocks are left (")


def test_an_epoch_that_is_left_by_plan_has_no_failure(tmp_path: Path) -> None:
    inquiry = made(tmp_path, {})
    inquiry.add(m.Durable("node-0", 1, 4, 7))
    assert not inquiry.take()

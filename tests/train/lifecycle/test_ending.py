"""A failing process leaves a typed record, and its launcher shows that and no other lines of the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.observe.logs.line import LogLine, encode
from phalanx.train.lifecycle.ending import (
    Failure,
    RunFailedError,
    failure_file,
    last_words,
    read_failure,
    remove_failure,
    report_failure,
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "attempt-002-rank-00003.jsonl"
    for number, text in enumerate(("error: a line of a library that is not our error", "working")):
        with path.open("ab") as file:
            file.write(encode(LogLine(float(number), "info", "host", 3, None, 2, None, text)))
    return path


def test_the_record_of_a_failure_is_read_back(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(RunFailedError("the disk is full; make room", "make room"), log, 2, 3)
    assert read_failure(log) == Failure("RunFailedError", "the disk is full; make room", 2, 3, "make room")
    assert capsys.readouterr().err == "error: the disk is full; make room\n"
    assert [path.name for path in log.parent.iterdir() if path != log] == [failure_file(log).name]


def test_the_user_sees_the_error_with_all_its_lines(log: Path) -> None:
    report_failure(ValueError("two\nlines"), log, 2)
    assert last_words(log, "ended with exit code 1") == "two\nlines"
    assert last_words(log, "it could not run", prefix="it could not run: ") == "it could not run: two\nlines"


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[1]", b'{"kind": 3}', b"\xff"])
def test_without_a_record_that_can_be_read_the_end_of_the_log_is_shown(
    log: Path, damage: bytes | None
) -> None:
    if damage is not None:
        failure_file(log).write_bytes(damage)
    words = last_words(log, "ended with exit code 1", lines=1)
    assert words == f"ended with exit code 1; the end of {log}:\nworking"


def test_a_process_that_left_no_log_either_has_ended_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "nothing.log"
    assert last_words(log, "ended with exit code 1") == f"ended with exit code 1; {log} is missing or empty"


def test_a_disk_that_takes_no_more_does_not_hide_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_failure(ValueError("what went wrong"), tmp_path / "missing" / "rank.log", 0, 0)
    assert capsys.readouterr().err == "error: what went wrong\n"


def test_a_path_that_is_not_utf8_does_not_hide_the_error(log: Path) -> None:
    report_failure(RunFailedError("cannot read \udcff; rename \udcff", "rename \udcff"), log, 2, 3)
    expected = Failure("RunFailedError", r"cannot read \udcff; rename \udcff", 2, 3, r"rename \udcff")
    assert read_failure(log) == expected


def test_the_record_of_an_earlier_process_is_removed(log: Path) -> None:
    remove_failure(log)  # none is there yet
    report_failure(ValueError("of an earlier life"), log, 2, 3)
    remove_failure(log)
    assert read_failure(log) is None

"""What a person, and a program, sees of the trials of a machine's kernels."""

from __future__ import annotations

import json
import sys

import pytest

from phalanx.cli.weights.service.start import Said
from phalanx.serve.numerics.trials import begin_part, expect_parts, tell_search


def try_two() -> None:
    """Two parts that are searched, and between them one that is known."""
    expect_parts(3)
    for part in ("the norm", "the softmax", "attention"):
        begin_part(part)
        if part != "the softmax":
            tell_search(None)


SENTENCE = (
    "trying this machine's kernels for exact numerics, at each start: there is no home folder to keep what is found in"
    "\n"
)


@pytest.mark.parametrize(
    ("terminal", "columns", "shown"),
    [
        (False, 80, ""),
        (True, 80, "\r1 of 3: the norm\r3 of 3: attention\n"),
        (True, 12, "\r1 of 3: the\r3 of 3: att\n"),
    ],
)
def test_it_is_said_once_and_on_a_terminal_also_how_far_it_is(
    terminal: bool,
    columns: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    with Said(as_json=False).trials():
        try_two()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", SENTENCE + shown)


def test_what_is_said_meanwhile_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said = Said(as_json=False)
    with said.trials():
        try_two()
        said.text("computing on the CPU")
    assert capsys.readouterr().err.endswith("3 of 3: attention\ncomputing on the CPU\n")


def test_a_program_gets_a_line_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    with Said(as_json=True).trials():
        try_two()
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [
        {"event": "numerics-trial", "part": "the norm", "number": 1, "of": 3, "kept": ""},
        {"event": "numerics-trial", "part": "attention", "number": 3, "of": 3, "kept": ""},
    ]
    assert said.err == ""


def test_nothing_is_said_where_all_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with Said(as_json=False).trials():
        pass
    assert capsys.readouterr() == ("", "")

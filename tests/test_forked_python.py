"""Programs that are forked from a template are to whoever starts them what executed ones are."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fact_program
import forked_python

PROGRAM = fact_program.__file__


def ended(kind: type[subprocess.Popen[Any]], ending: str, folder: Path, path: str = "") -> tuple[Any, ...]:
    """What a program told, its last words, and how it ended."""
    passed = os.open(os.devnull, os.O_RDONLY)
    process = kind(
        [sys.executable, PROGRAM, "one two", ending],
        cwd=folder,
        env={
            **forked_python.ENVIRONMENT,
            **({"PYTHONPATH": path} if path else {}),
            "OF_THE_TEST": "ü",
            "TMPDIR": str(folder),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[passed],
        start_new_session=ending == "code",
        text=True,
    )
    os.close(passed)
    facts_line, *more = process.communicate(timeout=240)[0].splitlines()
    return json.loads(facts_line), more, process.returncode


def apart(one: tuple[Any, ...], other: tuple[Any, ...]) -> dict[str, object]:
    """The facts in which two programs differ, and their ends if those do."""
    facts = {name: (one[0][name], other[0][name]) for name in one[0] if one[0][name] != other[0][name]}
    return facts if one[1:] == other[1:] else {**facts, "ended": (one[1:], other[1:])}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("return", 0),
        ("code", 75),
        ("text", 1),
        ("error", 1),
        ("interrupted", -signal.SIGINT),
        ("killed", -signal.SIGKILL),
        ("thread", 0),
    ],
)
def test_a_forked_program_finds_and_leaves_what_an_executed_one_does(
    ending: str, code: int, tmp_path: Path
) -> None:
    forked, executed = (ended(kind, ending, tmp_path) for kind in (forked_python.Popen, subprocess.Popen))
    assert apart(forked, executed) == {}
    assert (forked[0]["parent"], forked[2]) == (os.getpid(), code)


def test_it_looks_for_modules_where_its_environment_says(tmp_path: Path) -> None:
    before = forked_python.ENVIRONMENT.get("PYTHONPATH", "elsewhere")
    path = os.pathsep.join([before, str(tmp_path / "more"), "under", before])
    forked, executed = (
        ended(kind, "return", tmp_path, path) for kind in (forked_python.Popen, subprocess.Popen)
    )
    assert apart(forked, executed) == {}


def test_a_program_that_begins_with_code_of_its_environment_is_executed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit('here')")
    process = forked_python.Popen(
        [sys.executable, PROGRAM],
        env={**forked_python.ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    assert b"here" in process.communicate(timeout=240)[1]


def test_errors_are_shown_as_by_python() -> None:
    error_texts = [
        kind([sys.executable, PROGRAM, word], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        .communicate()[1]
        .splitlines()[-1]
        for word in ("text", "error")
        for kind in (forked_python.Popen, subprocess.Popen)
    ]
    assert error_texts == ["no way on"] * 2 + ["RuntimeError: unforeseen"] * 2


def test_a_folder_that_is_not_there_is_the_same_error(tmp_path: Path) -> None:
    errors = []
    for kind in (forked_python.Popen, subprocess.Popen):
        with pytest.raises(FileNotFoundError) as caught:
            kind([sys.executable, PROGRAM, "return"], cwd=tmp_path / "gone")
        errors.append((caught.value.errno, str(caught.value.filename)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("answer", "error"), [(str(-errno.EAGAIN), BlockingIOError), ("", AssertionError)])
def test_a_template_that_cannot_fork_gives_no_process_id(answer: str, error: type[Exception]) -> None:
    """-1 for one would be everybody's: ``kill`` would end all processes of the user."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.sendall(answer.encode()) if answer else theirs.close()
        template = forked_python.Template(ours, forked_python.ENVIRONMENT)
        with pytest.raises(error, match="template"):
            template.fork({}, [0])


@pytest.mark.parametrize("asked", [{"umask": 0o27}, {"process_group": 0}])
def test_what_a_template_does_not_do_for_a_program_is_done_by_execution(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = []
    monkeypatch.setattr(subprocess.Popen, "_execute_child", lambda *given: executed.append(given))
    forked_python.Popen([sys.executable, PROGRAM], **asked)._child_created = False  # type: ignore[attr-defined]
    assert executed


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ([sys.executable, "-c", "pass"], {}),
        ([sys.executable, "-X", "importtime", PROGRAM], {}),
        ([sys.executable, "-m", "json.tool"], {}),
        (["true"], {}),
        ([sys.executable, PROGRAM], {"OMP_NUM_THREADS": "7"}),
    ],
)
def test_what_the_template_does_not_have_is_executed(command: list[str], changed: dict[str, str]) -> None:
    template = forked_python.own_template()
    assert template is not None
    assert template.has([sys.executable, PROGRAM], forked_python.ENVIRONMENT)
    assert not template.has(command, {**forked_python.ENVIRONMENT, **changed})

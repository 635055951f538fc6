"""The arguments of a program come back as they were given, and those that are missing have their defaults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from phalanx.process.arguments import parsed, words_of


@dataclass(frozen=True)
class Arguments:
    run_dir: Path
    number: int
    name: str = ""
    factors: tuple[int, ...] = ()
    sentences: tuple[str, ...] = ("none",)
    is_spare: bool = False
    folder: Path | None = None
    kind: Literal["end", "wait"] = "end"


@pytest.mark.parametrize(
    "args",
    [
        Arguments(Path("run"), 0),
        Arguments(Path("a b"), -3, "node", (3, 5), ("kill rank 0 at step 3", ""), True, Path("c"), "wait"),
        Arguments(Path("run"), 1, sentences=()),
        Arguments(Path("-run"), 1, "--is-spare", (-1, 2), ("-", "", "--name", "none")),
    ],
)
def test_arguments_come_back_as_they_were_given(args: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *words_of(args)])
    assert parsed(Arguments, "program") == args


def test_a_program_without_its_required_arguments_ends_and_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--run-dir", "run"])
    with pytest.raises(SystemExit) as end:
        parsed(Arguments, "program")
    assert end.value.code == 2
    assert "--number" in capsys.readouterr().err

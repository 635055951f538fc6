"""The command line's own part: what the system refuses is an error message with a name, not a traceback."""

from __future__ import annotations

import pytest

from phalanx.cli.main import exit_code


@pytest.mark.parametrize(
    "command", ["export --to hf {} out", "hash {}", "checkpoint verify {}", "goodput {}", "show {}"]
)
def test_a_place_that_the_system_refuses_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    too_long = "x" * 300
    assert exit_code(command.format(too_long).split()) in (1, 2)
    assert too_long in capsys.readouterr().err.replace("\n", "")

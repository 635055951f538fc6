"""The list of models that a run file or a plan can name."""

from __future__ import annotations

from click.testing import CliRunner

from phalanx.model.facts.presets import PRESETS
from phalanx_plan.cli.catalogs import models_command


def test_names_are_whole_in_a_narrow_terminal() -> None:
    lines = CliRunner().invoke(models_command, env={"COLUMNS": "80"}).output.splitlines()
    assert all(any(name in line.split() for line in lines) for name in PRESETS)

"""The written reference is the code's own."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cli.train.run_file import spec_command as command
from phalanx.run.fields import Problem, read_section, sections
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec
from tools.reference.pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_what_the_code_generates(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "write it again: make reference"


@pytest.mark.parametrize("name", [name for name, _, _ in sections(RunSpec) if name])
def test_a_printed_section_is_toml_that_reads_back_as_its_defaults(name: str) -> None:
    table: Any = tomllib.loads(CliRunner().invoke(command, [name]).output)
    for part in name.split("."):
        table = table[part]
    table = table[0] if isinstance(table, list) else table  # one of any number of tables
    kind = next(kind for section, kind, _ in sections(RunSpec) if section == name)
    problems: list[Problem] = []
    assert read_section(kind, table, problems) == kind()
    assert problems == []
    absent = {"sources", "tasks", "samples"}  # lists of tables, of which none is printed
    written = {field.name for field in dataclasses.fields(kind) if field.default is not None}
    assert table.keys() == written - absent


def test_all_of_what_is_printed_is_a_run_file_with_every_default(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(CliRunner().invoke(command, []).output)
    assert read_run(file, {}) == RunSpec()

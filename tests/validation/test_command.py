"""``python -m validation`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from validation.command import command
from validation.runs import TABLE


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def facts(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.slow  # factors are fitted to the whole published table
def test_a_table_of_runs_is_validated_row_by_row(tmp_path: Path) -> None:
    head, *rows = TABLE.read_text().splitlines()
    path = tmp_path / "few.csv"
    path.write_text("\n".join([head, *rows[:4]]) + "\n")
    page = tmp_path / "accuracy.md"
    validated = facts(str(path), "--report", str(page))
    assert page.read_text().startswith("#")
    assert len(validated["rows"]) == 4
    for row in validated["rows"]:
        assert row["excluded"] or row["predicted_step_s"] > 0 or row["predicted_memory_bytes"] > 0
    assert validated["families"]


def test_the_table_of_any_file_in_the_published_format_has_the_reason_why_a_row_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row that is left out needs no factors, which are fitted on the whole published table.
    monkeypatch.setattr("validation.compare.read_published", lambda: ())
    head = TABLE.read_text().splitlines()[0]
    table = tmp_path / "runs.csv"
    table.write_text(f"{head}\nonly,a,name\n")
    result = run(str(table), "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["excluded"]


def test_a_missing_table_is_named_with_exit_code_two() -> None:
    result = run("nowhere.csv")
    assert result.exit_code == 2
    assert "nowhere.csv does not exist" in result.output


def test_the_installed_package_does_not_know_validation() -> None:
    sources = (Path(__file__).parents[2] / "src").rglob("*.py")
    assert not [
        path
        for path in sources
        if "import validation" in (text := path.read_text()) or "from validation" in text
    ]

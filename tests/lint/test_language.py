"""The ratchet: counts may fall, must then be recorded, and never rise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lint.language import BASELINE, command

MODULE = "src/phalanx/module.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one module that has two recorded offenses."""
    for folder in ("src/phalanx", "docs/evidence", "lint"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("A short page.\n")
    (tmp_path / MODULE).write_text("found = 1\ntold = 2\n")
    (tmp_path / BASELINE).write_text(f'"{MODULE}" = {{ vague-name = 2 }}\n')
    return tmp_path


def lint(root: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["--root", str(root), *options])


def test_recorded_offenses_pass(root: Path) -> None:
    result = lint(root)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("language: 0 counts above the baseline, 0 below it\n")


def test_one_more_offense_fails_with_file_line_rule_and_advice(root: Path) -> None:
    (root / MODULE).write_text("found = 1\ntold = 2\nheld = 3\n")
    result = lint(root)
    assert result.exit_code == 1
    assert f"{MODULE}: vague-name: 3, of which 2 are recorded. name the value by what it is" in result.output
    assert f"{MODULE}:3: held" in result.output


def test_a_new_file_may_have_none(root: Path) -> None:
    (root / "src/phalanx/new.py").write_text('"""What is new."""\n')
    result = lint(root)
    assert result.exit_code == 1
    assert "src/phalanx/new.py:1: What is new." in result.output


def test_tests_and_benches_speak_the_same_language_also_in_their_names(root: Path) -> None:
    (root / "tests").mkdir()
    (root / "bench").mkdir()
    (root / "tests/test_new.py").write_text("def test_the_user_is_told() -> None: ...\n")
    (root / "bench/new.py").write_text("found = 1\n")
    result = lint(root)
    assert result.exit_code == 1
    assert "tests/test_new.py:1: test_the_user_is_told" in result.output
    assert "bench/new.py:1: found" in result.output


def test_fewer_offenses_fail_until_they_are_recorded(root: Path) -> None:
    (root / MODULE).write_text("found = 1\n")
    result = lint(root)
    assert result.exit_code == 1
    assert "vague-name: 1, recorded are 2. Run: python -m lint.language --update" in result.output
    assert lint(root, "--update").exit_code == 0
    assert f'"{MODULE}" = {{ vague-name = 1 }}\n' in (root / BASELINE).read_text()
    assert lint(root).exit_code == 0


def test_the_entry_of_a_file_without_offenses_is_removed(root: Path) -> None:
    (root / MODULE).unlink()
    assert lint(root).exit_code == 1
    assert lint(root, "--update").exit_code == 0
    assert MODULE not in (root / BASELINE).read_text()


def test_update_records_nothing_while_any_count_is_higher(root: Path) -> None:
    (root / MODULE).write_text("found = 1\n")
    (root / "README.md").write_text("It ran on 2026-11-26.\n")
    before = (root / BASELINE).read_text()
    assert lint(root, "--update").exit_code == 1
    assert (root / BASELINE).read_text() == before


def test_the_pages_of_evidence_are_exempt(root: Path) -> None:
    (root / "docs/evidence/runs.md").write_text("It ran on 2026-11-26.\n")
    assert lint(root).exit_code == 0
    (root / "docs/runs.md").write_text("It ran on 2026-11-26.\n")
    assert "docs/runs.md:1: 2026-11-26" in lint(root).output


def test_json_has_the_offenses_above_the_baseline_and_the_totals(root: Path) -> None:
    (root / "README.md").write_text("It ran on 2026-11-26.\n")
    facts = json.loads(lint(root, "--json").output)
    assert [(item["path"], item["rule"]) for item in facts["raised"]] == [("README.md", "date")]
    assert facts["rules"] == {"vague-name": 2, "date": 1}
    assert facts["prose"] == {"words": 4, "sentences": 1}

"""The written reference is the code's own."""

from __future__ import annotations

from pathlib import Path

from phalanx_process import run

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def test_the_page_of_the_run_file_is_what_the_command_prints(tmp_path: Path) -> None:
    printed = run(["spec", "--markdown"], tmp_path).stdout
    assert PAGE.read_text().endswith(printed), "make it anew: phalanx spec --markdown"

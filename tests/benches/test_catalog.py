"""Every bench states its needs, has --help and a small run, and is named in the documents by its command alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import PAGE, table
from bench.catalog import BENCHES
from forked_python import Popen

ROOT = Path(__file__).resolve().parents[2]
STARTED_BY_OTHERS = {"fleet.torchft_loop", "watch.page_viewers"}
"""Programs that a bench starts."""
WITH_RULES_OF_THEIR_OWN = {"mutation", "gpu", "gpu.__main__", "__main__"}
QUICK = [name for name, needs in BENCHES.items() if not needs.slow and not needs.peers]
SLOW = [name for name, needs in BENCHES.items() if needs.slow]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT / "bench").with_suffix("").parts)


def run(*words: str, timeout_s: float = 280.0) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a Python with these arguments."""
    process = Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()  # if it takes longer; a supervised bench then ends its own processes
    return process.returncode, out, errors


def test_every_module_with_a_main_states_its_needs_and_runs_under_supervision() -> None:
    mains = {
        module_name(file)
        for file in (ROOT / "bench").rglob("*.py")
        if '__name__ == "__main__"' in file.read_text()
    }
    assert mains - STARTED_BY_OTHERS - WITH_RULES_OF_THEIR_OWN == BENCHES.keys()
    unsupervised = [
        name
        for name in BENCHES
        if "run_bench(main)" not in (ROOT / "bench" / f"{name.replace('.', '/')}.py").read_text()
    ]
    assert unsupervised == []


def test_every_bench_has_help() -> None:
    code, out, errors = run(str(Path(__file__).with_name("show_help.py")), *BENCHES)
    assert (code, out) == (0, ""), errors


def imported_modules(file: Path) -> set[str]:
    """Return the modules of ``bench`` that a file imports, wherever in it."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if (node.module or "").split(".")[0] == "bench"}  # type: ignore[misc]


def test_every_bench_imports_modules_that_exist() -> None:
    missing = {
        (module_name(file), module)
        for file in (ROOT / "bench").rglob("*.py")
        for module in imported_modules(file)
        if not (place := ROOT / module.replace(".", "/")).with_suffix(".py").exists() and not place.is_dir()
    }
    assert missing == set()


def test_no_folder_of_benches_holds_more_than_fourteen_files() -> None:
    folders = [ROOT / "bench", *(folder for folder in (ROOT / "bench").iterdir() if folder.is_dir())]
    assert [folder.name for folder in folders if len(list(folder.glob("*.py"))) > 14] == []


def test_benches_are_started_by_module_everywhere_and_exist() -> None:
    files = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "EXTENDING.md", "CHANGELOG.md", "Makefile")
    ]
    for folder in ("docs", "src", "bench", "validation", "examples", "deploy"):
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".md"}]
    for file in files:
        text = file.read_text()
        assert re.findall(r"\bbench/[\w/]*\.py\b", text) == [], file
        named = {name.rstrip(".") for name in re.findall(r"-m bench\.([\w.]+)", text)}
        assert named - BENCHES.keys() - {"NAME"} - WITH_RULES_OF_THEIR_OWN - STARTED_BY_OTHERS == set(), file


def test_the_page_of_benches_lists_all() -> None:
    assert PAGE.read_text().endswith(table()), "write it again: python -m bench --write"


def run_in_small(name: str, folder: Path, timeout_s: float = 280.0) -> None:
    rows = folder / "rows.jsonl"
    code, out, errors = run("-m", f"bench.{name}", "--small", "--out", str(rows), timeout_s=timeout_s)
    assert code == 0, errors
    assert out
    assert rows.read_text()


@pytest.mark.parametrize("name", QUICK)
def test_a_bench_runs_in_small(name: str, tmp_path: Path) -> None:
    run_in_small(name, tmp_path)


@pytest.mark.servers
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SLOW)
def test_a_longer_bench_runs_in_small(name: str, tmp_path: Path) -> None:
    run_in_small(name, tmp_path, timeout_s=1100.0)


@pytest.mark.parametrize("name", [name for name, needs in BENCHES.items() if needs.peers])
def test_a_bench_without_its_peer_names_the_command_that_installs_it(name: str) -> None:
    code, _, errors = run("-m", f"bench.{name}", "--small")
    assert code == 4
    assert " is not installed: " in errors
    assert BENCHES[name].peers[0][1] in errors
    assert errors.count("\n") == 1

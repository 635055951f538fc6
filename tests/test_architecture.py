"""The house: a package imports only from lower floors, and quick commands never wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "phalanx"
FLOORS = {
    "run": 0,
    "observe": 1,
    "hardware": 1,
    "model": 2,
    "data": 2,
    "parallel": 3,
    "checkpoint": 4,
    "plan": 5,
    "train": 5,
    "launch": 6,
    "fleet": 6,
    "serve": 7,
    "simulate": 7,
    "cli": 8,
}
FILES = sorted(SOURCE.rglob("*.py"))


def imported_packages(file: Path) -> set[str]:
    """The packages of ours that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("phalanx.")} & FLOORS.keys()


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == FLOORS.keys()


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parent != SOURCE], ids=lambda f: str(f.relative_to(SOURCE))
)
def test_a_package_imports_only_from_lower_floors(file: Path) -> None:
    own = file.relative_to(SOURCE).parts[0]
    too_high = {name for name in imported_packages(file) if name != own and FLOORS[name] >= FLOORS[own]}
    assert not too_high


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_module_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text()))


@pytest.mark.parametrize(
    "module",
    [
        "phalanx.cli.main",
        "phalanx.cli.train.train_command",
        "phalanx.cli.plan.show_command",
        "phalanx.cli.watch.goodput_command",
        "phalanx.cli.watch.watch_command",
        "phalanx.cli.plan.spec_command",
        "phalanx.cli.train.data_command",
        "phalanx.train.lifecycle.prepare",
        "phalanx.launch.local",
        "phalanx.fleet.core.decide",
        "phalanx.fleet.core.messages",
        "phalanx.fleet.core.retention",
        "phalanx.simulate.hostile.world",
        "phalanx.simulate.large",
        "phalanx.cli.fleet.simulate_command",
        "phalanx.plan.search.search",
        "phalanx.plan.step_cost.estimate",
        "phalanx.plan.search.request",
        "phalanx.plan.report.page",
        "phalanx.model.facts.holdings",
        "phalanx.parallel.pipeline.schedules",
        "phalanx.fleet.control.coordinator",
        "phalanx.fleet.node.agent",
    ],
)
def test_quick_commands_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The record of what users rely on, the runs that it is taken from, and the option that rewrites it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from contract.recorded import REMEDY, differences, read_record, write_record
from contract.tiny import write_inputs
from phalanx_process import last_json, run

STORED = Path(__file__).parent / "stored"

Contract = Callable[[str, Mapping[str, str]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record``, which ``make contract`` passes."""
    parser.addoption("--record", action="store_true", help="Rewrite tests/contract/records/.")


@pytest.fixture(scope="session")
def contract(pytestconfig: pytest.Config) -> Contract:
    """Compare facts with the record of a name, or rewrite the record under ``--record``."""

    def compare(name: str, facts: Mapping[str, str]) -> None:
        if pytestconfig.getoption("--record", default=False):
            write_record(name, facts)
        lines = differences(read_record(name), facts)
        if lines:
            text = "\n  ".join((f"tests/contract/records/{name}.json and the code differ:", *lines))
            pytest.fail(f"{text}\n{REMEDY}", pytrace=False)

    return compare


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stored files: ``tiny.toml``, the dataset ``words`` and the run ``runs/tiny``."""
    return shutil.copytree(STORED, tmp_path_factory.mktemp("stored") / "work")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A folder like ``stored`` in which the present code has trained and packed, and what ``train --json`` printed."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    printed = last_json(run(["train", "tiny.toml", "--json"], folder))
    assert run(["pack", "runs/tiny"], folder).returncode == 0
    return folder, printed


@pytest.fixture
def in_stored(stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is the folder of the stored files."""
    monkeypatch.chdir(stored)
    monkeypatch.delenv("PHALANX_COMMAND", raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return stored

"""A run file and an undisturbed run to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx_process import RUN_FILE, last_json, run
from tiny_runs import make_dataset


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file on a prepared dataset."""
    folder = tmp_path_factory.mktemp("run-file")
    data = make_dataset(folder / "words")
    file = folder / "tiny.toml"
    file.write_text(RUN_FILE.format(data=data))
    return file


@pytest.fixture(scope="session")
def undisturbed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights when nothing goes wrong, on one rank."""
    done = run(["train", str(run_file), "--ranks", "1", "--json"], tmp_path_factory.mktemp("undisturbed"))
    return str(last_json(done)["weights_sha256"])

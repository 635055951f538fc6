"""A finished run to look at with every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx_process import RUN_FILE, last_json, run
from tiny_runs import make_dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run file, ``tiny.toml``, and a prepared dataset."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(RUN_FILE.format(data=make_dataset(folder / "words")))
    return folder


@pytest.fixture(scope="session")
def result(folder: Path) -> dict[str, object]:
    """The result that ``phalanx train --json`` printed for a run of six steps."""
    return last_json(run(["train", "tiny.toml", "--ranks", "2", "--set", "train.steps=6", "--json"], folder))

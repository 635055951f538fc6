"""A dataset that the runs of these tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import make_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("dataset") / "words")

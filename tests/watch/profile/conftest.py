"""A dataset, and what was recorded of a run of four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import make_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared dataset of byte tokens."""
    return make_dataset(tmp_path_factory.mktemp("data") / "words")

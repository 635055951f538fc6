"""A real Ray of this machine prepares the same bytes, also when a worker dies. It takes the package ray, which the other tests do without."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import LOCAL, RayCluster

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'phalanx-train[ray]'")
pytestmark = pytest.mark.slow

DIES_ONCE = """
import os
import signal
from pathlib import Path


def clean(document):
    once = Path({once!r})
    if once.exists():
        once.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return document
"""


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes ~/.ray/auth_token
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def test_a_ray_of_this_machine_writes_the_same_bytes_and_a_worker_that_dies_changes_none(
    tmp_path: Path,
) -> None:
    raw_folder(tmp_path)
    once = tmp_path / "once"
    (tmp_path / "filters.py").write_text(DIES_ONCE.format(once=str(once)))
    recipe = recipe_file(tmp_path, '[dedup]\n[[step]]\nuse = "filters.py:clean"', output="seq_len = 64")
    prepared(recipe, tmp_path / "alone")
    once.touch()
    executor = RayCluster(LOCAL)
    try:
        prepared(recipe, tmp_path / "ray", executor)
    finally:
        executor.close()
    assert not once.exists()
    assert objects(tmp_path / "ray") == objects(tmp_path / "alone")


def test_a_failure_in_a_task_is_reported_and_nothing_is_sealed(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    (tmp_path / "filters.py").write_text("def clean(document):\n    raise SystemError('no good')\n")
    recipe = recipe_file(tmp_path, '[[step]]\nuse = "filters.py:clean"')
    executor = RayCluster(LOCAL)
    try:
        with pytest.raises(PreparationError, match="no good"):
            prepared(recipe, tmp_path / "ray", executor)
    finally:
        executor.close()
    assert not (tmp_path / "ray" / "index.json").exists()


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(PreparationError, match="no Ray answers at auto"):
        RayCluster("auto")

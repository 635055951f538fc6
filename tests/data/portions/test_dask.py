"""A real Dask cluster of this machine prepares the same bytes, also when a worker dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import DaskCluster

distributed = pytest.importorskip("distributed")


def test_a_cluster_writes_the_same_bytes_and_a_worker_that_dies_changes_none(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, "[dedup]", output="seq_len = 64")
    prepared(recipe, tmp_path / "alone")
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        local_directory=str(tmp_path),
    ) as cluster:
        executor = DaskCluster(cluster.scheduler_address)
        try:
            prepared(recipe, tmp_path / "first", executor)
            os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
            prepared(recipe, tmp_path / "second", executor)
        finally:
            executor.close()
    assert objects(tmp_path / "first") == objects(tmp_path / "second") == objects(tmp_path / "alone")


def test_an_address_without_a_scheduler_is_refused() -> None:
    with pytest.raises(PreparationError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        DaskCluster("tcp://127.0.0.1:9", connect_timeout_s=1)

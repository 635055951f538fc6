"""A real Spark of this machine prepares the same bytes. It takes pyspark and a Java, which the other tests do without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import SparkCluster

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'phalanx-train[spark]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("java") is None, reason="Spark needs Java: apt-get install default-jre-headless"
    ),
]


def test_a_spark_of_this_machine_writes_the_same_bytes(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, "[dedup]", output="seq_len = 64")
    prepared(recipe, tmp_path / "alone")
    executor = SparkCluster("local[2]")
    try:
        prepared(recipe, tmp_path / "spark", executor)
    finally:
        executor.close()
    assert objects(tmp_path / "spark") == objects(tmp_path / "alone")


def test_a_failure_in_a_task_is_reported_and_nothing_is_sealed(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    (tmp_path / "filters.py").write_text("def clean(document):\n    raise SystemError('no good')\n")
    recipe = recipe_file(tmp_path, '[[step]]\nuse = "filters.py:clean"')
    executor = SparkCluster("local[2]")
    try:
        with pytest.raises(PreparationError, match="no good"):
            prepared(recipe, tmp_path / "spark", executor)
    finally:
        executor.close()
    assert not (tmp_path / "spark" / "index.json").exists()


def test_a_master_that_cannot_be_is_refused() -> None:
    with pytest.raises(PreparationError, match="--spark nowhere: Could not parse Master URL"):
        SparkCluster("nowhere")

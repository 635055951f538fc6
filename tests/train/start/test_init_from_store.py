"""Runs that begin from a checkpoint in an object store: with the bits of one that begins from the same checkpoint in a folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from phalanx.checkpoint.committed.copying import copy_step
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.data.reading.sources import open_places
from phalanx.run.directory.paths import read_small_json
from phalanx.run.fields import RunFileError
from phalanx.run.spec import DataSpec, RunSpec
from phalanx.store.open_store import open_store
from phalanx.train.start.checks import start_problems
from phalanx.train.start.prepare import resolve
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from store.servers import Server
from tiny_runs import tiny_run, train_on_this_rank


@pytest.fixture(scope="module")
def parent(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> DiskTier:
    """The checkpoints of a finished run, of steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("parent") / "run"
    ranks.run(2, train_on_this_rank, tiny_run(dataset, run_dir, steps=4))
    return DiskTier(run_dir / "checkpoints")


@pytest.fixture
def url(parent: DiskTier, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with copies of both."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    for step in parent.steps():
        copy_step(parent, step, ObjectTier(open_store(url)))
    return url


def beginning(dataset: Path, run_dir: Path, start: str, init_with: str = "weights") -> RunSpec:
    spec = replace_at(tiny_run(dataset, run_dir, steps=2), "checkpoint.init_from", start)
    spec = replace_at(spec, "checkpoint.init_with", init_with)
    return resolve(spec, open_places(spec.data), Path("tiny.toml"))


def train_in(spec: RunSpec, environment: dict[str, str]) -> dict[str, object] | None:
    os.environ.update(environment)
    return train_on_this_rank(spec)


@pytest.mark.parametrize("init_with", quick(["weights", "optimizer"], of_the_suite=["optimizer"]))
def test_a_run_from_a_store_has_the_bits_of_one_from_a_folder(
    ranks: Ranks, dataset: Path, tmp_path: Path, parent: DiskTier, url: str, s3_server: Server, init_with: str
) -> None:
    local = beginning(dataset, tmp_path / "local", str(parent.folder(4)), init_with)
    remote = beginning(dataset, tmp_path / "remote", url, init_with)
    assert remote.checkpoint.init_from == f"{url}/step-00000004", (
        "the newest, so that a later start means the same"
    )
    assert list(start_problems(remote, open_places(remote.data), begins=True)) == []
    (expected, *_) = ranks.run(2, train_on_this_rank, local)
    (actual, *_) = ranks.run(3, train_in, remote, dict(s3_server.environment))
    assert actual is not None
    assert actual["weights_sha256"] == expected["weights_sha256"]
    (origin,) = read_small_json(tmp_path / "remote" / "record.json")["lineage"]
    (there,) = read_small_json(tmp_path / "local" / "record.json")["lineage"]
    assert (origin["run_dir"], origin["step"]) == (url, 4)
    assert origin["weights_sha256"] == there["weights_sha256"]


def test_a_step_that_is_named_is_meant_and_need_not_be_there_yet(dataset: Path, tmp_path: Path) -> None:
    start = f"file://{tmp_path}/store/step-00000002"
    spec = beginning(dataset, tmp_path / "run", start)
    assert spec.checkpoint.init_from == start
    (problem,) = start_problems(spec, open_places(spec.data), begins=True)
    assert problem.path == "checkpoint.init_from"
    assert "step 2 is not in the store" in problem.finding
    assert "there are none" in problem.finding
    assert list(start_problems(spec, open_places(spec.data), begins=False)) == []


def test_a_store_without_a_checkpoint_is_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"there is no checkpoint in file://.*/store"):
        beginning(dataset, tmp_path / "run", f"file://{tmp_path}/store")
    with pytest.raises(RunFileError, match="no such kind of store"):
        beginning(dataset, tmp_path / "run", "ftp://host/x")


def test_another_model_and_a_whole_training_are_refused_before_a_rank_starts(
    dataset: Path, tmp_path: Path, parent: DiskTier
) -> None:
    url = f"file://{tmp_path}/store"
    copy_step(parent, 4, ObjectTier(open_store(url)))
    places = open_places(DataSpec(path=str(dataset)))
    spec = beginning(dataset, tmp_path / "run", url)
    (problem,) = start_problems(replace_at(spec, "model.layers", 3), places, begins=True)
    assert "holds the weights of another model: blocks.2." in problem.finding
    (problem,) = start_problems(replace_at(spec, "checkpoint.init_with", "training"), places, begins=True)
    assert problem.path == "checkpoint.init_with"

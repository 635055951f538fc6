"""Runs whose checkpoints are copied to an object store: what is there, who may use it, and going on from it alone."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.checkpoint.committed.copying import verify_tier
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.cli.train import train_command
from phalanx.data.reading.sources import open_place
from phalanx.data.stored.index import read_index
from phalanx.observe.event_log import read_events
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Restored
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.identity import identity
from phalanx.run.read import ONLY
from phalanx.run.rules import check
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import open_store
from phalanx.store.store import UnavailableError
from phalanx.train.start import open_run as claim_module
from phalanx.train.start.checks import start_problems
from phalanx.train.start.open_run import claim_store
from ranks import Ranks
from store.faulty_proxy import Faults, faulty_proxy
from store.scripted_server import scripted
from store.servers import CREDENTIALS, Server
from tiny_runs import tiny_run, train_on_this_rank


def with_store(spec: RunSpec, store: Path | str, **fields: Any) -> RunSpec:
    return dataclasses.replace(
        spec, checkpoint=dataclasses.replace(spec.checkpoint, store=str(store), **fields)
    )


def bodies(run_dir: Path, kind: type) -> list[Any]:
    return [event.body for event in read_events(run_dir / "events.jsonl") if isinstance(event.body, kind)]


def train_with_environment(spec: RunSpec, environment: dict[str, str]) -> dict[str, Any] | None:
    """``train_on_this_rank`` in a process that reaches the store by ``environment``."""
    import os

    os.environ.update(environment)
    return train_on_this_rank(spec)


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of a run that nothing happened to."""
    spec = tiny_run(dataset, tmp_path_factory.mktemp("undisturbed") / "run")
    return str(ranks.run(2, train_on_this_rank, spec)[0]["weights_sha256"])


@pytest.mark.servers
def test_a_run_that_lost_its_disk_goes_on_from_the_store_alone_on_other_ranks_with_the_same_bits(
    ranks: Ranks,
    dataset: Path,
    tmp_path: Path,
    s3_server: Server,
    undisturbed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, environment = tmp_path / "run", dict(s3_server.environment)
    spec = with_store(tiny_run(dataset, run_dir), s3_server.url(secrets.token_hex(8)), store_mib_s=1000.0)
    ranks.run(2, train_with_environment, spec, environment)
    shutil.rmtree(run_dir)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = ObjectTier(open_store(spec.checkpoint.store))
    assert store.steps() == [4, 6]
    store.delete(6)  # it was not there yet when the disk was lost
    with faulty_proxy(s3_server.port, Faults(), seed=1) as proxy:
        (result, *_) = ranks.run(3, train_with_environment, spec, s3_server.behind(proxy.port))
    assert result["weights_sha256"] == undisturbed
    blocks = {request: times for request, times in proxy.asked.items() if "safetensors range:" in request}
    assert len(blocks) == 2, "one of each image"
    assert set(blocks.values()) == {1}, "three ranks need parts of both, and one has fetched it for all"
    (restored,) = bodies(run_dir, Restored)
    assert (restored.step, restored.source) == (4, spec.checkpoint.store)
    assert [copied.step for copied in bodies(run_dir, CheckpointCopied)] == [6]
    assert verify_tier(store, "store") == []
    assert bodies(run_dir, CheckpointFailed) == []


def test_saved_steps_are_copied_as_the_run_file_states(
    ranks: Ranks, dataset: Path, tmp_path: Path, undisturbed: str
) -> None:
    store = tmp_path / "store"
    spec = with_store(tiny_run(dataset, tmp_path / "run"), store, store_every_steps=4, store_keep_last=9)
    (result, *_) = ranks.run(2, train_on_this_rank, spec)
    assert result["weights_sha256"] == undisturbed
    tier = ObjectTier(open_store(str(store)))
    assert tier.steps() == [4, 6]
    assert verify_tier(tier, "store") == []
    assert [copied.step for copied in bodies(tmp_path / "run", CheckpointCopied)] == [4, 6]


def test_a_store_that_is_down_neither_ends_nor_changes_training(
    ranks: Ranks, dataset: Path, tmp_path: Path, undisturbed: str
) -> None:
    store, run_dir = tmp_path / "store", tmp_path / "run"
    spec = with_store(tiny_run(dataset, run_dir), store)
    claim_store(spec, read_index(dataset).fingerprint)
    (store / "data").write_text("a file where the folder should be")
    (result, *_) = ranks.run(2, train_on_this_rank, spec)
    assert result["weights_sha256"] == undisturbed
    assert [failed.step for failed in bodies(run_dir, CheckpointFailed)][:1] == [2]
    assert DiskTier(run_dir / "checkpoints").steps() == [2, 4, 6]


def test_a_store_that_refuses_what_is_written_neither_ends_nor_changes_training_and_the_error_names_the_missing_right(
    ranks: Ranks,
    dataset: Path,
    tmp_path: Path,
    s3_server: Server,
    undisturbed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, url = tmp_path / "run", s3_server.url(secrets.token_hex(8))
    spec = with_store(tiny_run(dataset, run_dir), url)
    # The right to write was lost after the run had begun: the probe and the owner's record pass.
    with faulty_proxy(s3_server.port, Faults(denied="/data/step-"), seed=1) as proxy:
        environment = s3_server.behind(proxy.port)
        (result, *_) = ranks.run(2, train_with_environment, spec, environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert result["weights_sha256"] == undisturbed
        failed = bodies(run_dir, CheckpointFailed)
        assert {failure.step for failure in failed} == {2, 4, 6}
        assert f"403 AccessDenied on {url}/data/step-0000000" in failed[0].reason
        assert (
            "(PutObject): the credentials found (source: environment, AWS_ACCESS_KEY_ID) may not do this"
            in (failed[0].reason)
        )
        assert "SECRET" not in (run_dir / "events.jsonl").read_text()
        standing = str(store_standing(spec, RunDirectory(run_dir)))
        assert standing.startswith(f"in {url}: nothing yet; on disk alone: steps 2, 4, 6 (403 AccessDenied")
        assert ObjectTier(open_store(url)).steps() == []


@pytest.mark.parametrize(("denied", "request_name"), [("put ", "PutObject"), ("get ", "GetObject")])
def test_a_store_that_refuses_at_the_start_is_named_with_field_request_and_remedy_before_a_rank_starts(
    dataset: Path,
    tmp_path: Path,
    s3_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    denied: str,
    request_name: str,
) -> None:
    url = s3_server.url(secrets.token_hex(8))
    (run_file := tmp_path / "run.toml").write_text(
        f'[data]\npath = "{dataset}"\n[train]\nsteps = 2\nseq_len = 24\n'
    )
    with faulty_proxy(s3_server.port, Faults(denied=denied), seed=1) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        arguments = [
            "train",
            str(run_file),
            "--run-dir",
            str(tmp_path / "run"),
            "--set",
            f"checkpoint.store={url}",
        ]
        done = CliRunner().invoke(train_command.command, arguments[1:])
    printed = "".join(done.output.split("\n"))
    assert done.exit_code == 1
    assert f"checkpoint.store: 403 AccessDenied on {url}/" in printed
    assert f"({request_name}): the credentials found (source: environment, AWS_ACCESS_KEY_ID)" in printed
    assert "may not do this; give them the right, or set others" in printed
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_of_a_damaged_step_on_disk_the_copy_in_the_store_is_taken(
    ranks: Ranks, dataset: Path, tmp_path: Path, undisturbed: str
) -> None:
    run_dir = tmp_path / "run"
    spec = with_store(tiny_run(dataset, run_dir), tmp_path / "store")
    ranks.run(2, train_on_this_rank, spec)
    (run_dir / "result.json").unlink()
    disk = DiskTier(run_dir / "checkpoints")
    disk.delete(4)
    disk.delete(2)
    path = disk.folder(6) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (result, *_) = ranks.run(3, train_on_this_rank, spec)
    assert result["weights_sha256"] == undisturbed
    assert bodies(run_dir, Restored)[-1].source == spec.checkpoint.store


def test_a_store_records_its_run_and_refuses_other_runs_and_other_data(dataset: Path, tmp_path: Path) -> None:
    spec = with_store(tiny_run(dataset, tmp_path / "run"), tmp_path / "store")
    assert claim_store(spec, "data") == []
    assert claim_store(dataclasses.replace(spec, run_dir="elsewhere"), "data") == []
    other = dataclasses.replace(spec, optimizer=dataclasses.replace(spec.optimizer, lr=0.5))
    with pytest.raises(
        RunDirectoryError, match=r"of another run; give another URL:\n  optimizer.lr: 0.01 != 0.5"
    ):
        claim_store(other, "data")
    with pytest.raises(RunDirectoryError, match="the data: data != other"):
        claim_store(spec, "other")
    wider = dataclasses.replace(spec, parallel=dataclasses.replace(spec.parallel, tensor=2))
    assert [line.split(":")[0] for line in claim_store(wider, "data")] == ["parallel.tensor"]


def test_a_damaged_record_of_the_stores_owner_is_named(dataset: Path, tmp_path: Path) -> None:
    spec = with_store(tiny_run(dataset, tmp_path / "run"), tmp_path / "store")
    claim_store(spec, "data")
    for content in ("{", "[]", json.dumps({"run": 1, "data_fingerprint": "data"})):
        (tmp_path / "store" / "run.json").write_text(content)
        with pytest.raises(RunDirectoryError, match=r"run\.json is damaged"):
            claim_store(spec, "data")


def test_a_place_with_checkpoints_of_an_unknown_run_is_not_taken(dataset: Path, tmp_path: Path) -> None:
    spec = with_store(tiny_run(dataset, tmp_path / "run"), tmp_path / "store")
    (tmp_path / "store" / "committed").mkdir(parents=True)
    (tmp_path / "store" / "committed" / "00000002.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=r"no run\.json names their run"):
            claim_store(spec, "data")


def test_a_store_that_ignores_conditions_is_refused_before_a_rank_starts(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.train.start.open_run import open_run

    with scripted() as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}.items():
            monkeypatch.setenv(name, value)
        spec = with_store(tiny_run(dataset, tmp_path / "run"), "s3://bucket/p")
        with pytest.raises(RunDirectoryError, match=r"checkpoint.store: s3://bucket/p ignores If-None-Match"):
            open_run(spec, read_index(dataset).fingerprint, Path(spec.data.path))


def test_a_run_with_checkpoints_of_its_own_starts_without_its_store_and_a_new_one_does_not(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(_url: str) -> None:
        raise UnavailableError("get of s3://b/p: no success within 180 s", "s3://b/p", "get")

    monkeypatch.setattr(claim_module, "open_store", down)
    spec = with_store(tiny_run(dataset, tmp_path / "run"), "s3://b/p")
    assert claim_store(spec, "data", has_begun=True) == []
    with pytest.raises(RunDirectoryError, match="no success within 180 s"):
        claim_store(spec, "data")


def test_where_copies_go_is_the_fleets_business(dataset: Path, tmp_path: Path) -> None:
    spec = tiny_run(dataset, tmp_path / "run")
    assert identity(with_store(spec, "s3://b/p", store_keep_every=7)) == identity(spec)


def test_fields_of_a_store_without_a_store_are_refused_and_fleets_may_have_one(tmp_path: Path) -> None:
    (problem,) = check(
        dataclasses.replace(RunSpec(), checkpoint=dataclasses.replace(RunSpec().checkpoint, store_mib_s=5.0))
    )
    assert (problem.path, problem.also) == ("checkpoint.store_mib_s", ("checkpoint.store",))
    spec = with_store(RunSpec(), tmp_path)
    assert check(spec) == []
    assert check(dataclasses.replace(spec, fleet=dataclasses.replace(spec.fleet, nodes=2))) == []


def test_a_url_that_names_no_store_is_a_problem_of_the_field(dataset: Path, tmp_path: Path) -> None:
    spec = with_store(tiny_run(dataset, tmp_path / "run"), "ftp://host/x")
    (problem,) = start_problems(spec, {ONLY: open_place(str(dataset))}, begins=True)
    assert (problem.path, "no such kind of store" in problem.finding) == ("checkpoint.store", True)

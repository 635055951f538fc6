"""Training on datasets in object stores: the bits are those of folders, through faults, kills and other ranks, and nobody hangs."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.reading.prefetch import Prefetch
from phalanx.data.stored.copies import copy_dataset
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message, Step, Stopped
from phalanx.process.this_process import StopRequest
from phalanx.run.identity import identity
from phalanx.run.rules import check
from phalanx.run.spec import RunSpec
from phalanx_process import steps_done
from ranks import Ranks
from run.specs import replace_at
from store.faulty_proxy import Faults, faulty_proxy
from store.servers import Server
from tiny_runs import tiny_run, train_on_this_rank


def train_with_environment(spec: RunSpec, environment: dict[str, str], *rest: Any) -> dict[str, Any] | None:
    """``train_on_this_rank`` in a process that reaches the store by ``environment``."""
    os.environ.update(environment)
    return train_on_this_rank(spec, *rest)


def in_store(spec: RunSpec, url: str, cache: Path, **fields: Any) -> RunSpec:
    return dataclasses.replace(
        spec, data=dataclasses.replace(spec.data, path=url, cache=str(cache), **fields)
    )


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, str]:
    """A run whose dataset is in a folder, and the hash of its weights."""
    spec = tiny_run(dataset, tmp_path_factory.mktemp("undisturbed") / "run")
    return spec, str(ranks.run(1, train_on_this_rank, spec)[0]["weights_sha256"])


@pytest.fixture
def url(dataset: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The dataset in an object store, for this process too."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    place = s3_server.url(secrets.token_hex(8))
    copy_dataset(str(dataset), place)
    return place


@pytest.mark.servers
def test_through_faults_a_crash_and_other_ranks_the_bits_are_those_of_the_folder(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec, weights = undisturbed
    spec = dataclasses.replace(in_store(spec, url, tmp_path / "cache"), run_dir=str(tmp_path / "run"))
    faults = Faults(slow_down=0.1, reset=0.05, truncated=0.05, latency_s=0.02)
    with faulty_proxy(s3_server.port, faults, seed=7) as proxy:
        ranks.run(2, train_with_environment, spec, s3_server.behind(proxy.port), 5)
        (result, *_) = ranks.run(3, train_with_environment, spec, s3_server.behind(proxy.port))
        assert sum(count for fault, count in proxy.done.items() if fault != "good") > 0
    assert result["weights_sha256"] == weights


@pytest.mark.servers
def test_a_cache_that_is_smaller_than_what_is_read_ahead_gives_a_warning_and_changes_no_bit(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec, weights = undisturbed
    spec = in_store(spec, url, tmp_path / "cache", cache_gib=2**-13, read_ahead_mib=64.0)
    spec = dataclasses.replace(spec, run_dir=str(tmp_path / "run"))
    (result,) = ranks.run(1, train_with_environment, spec, dict(s3_server.environment))
    assert result["weights_sha256"] == weights
    events = (event.body for event in read_events(tmp_path / "run" / "events.jsonl"))
    (warning,) = [body.text for body in events if isinstance(body, Message) and "data.cache_gib" in body.text]
    assert "instead of data.read_ahead_mib = 64" in warning


@pytest.mark.slow
def test_a_run_on_a_dataset_in_googles_store_ends_with_the_bits_of_the_folders(
    ranks: Ranks,
    tmp_path: Path,
    dataset: Path,
    google_server: Server,
    undisturbed: tuple[RunSpec, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in google_server.environment.items():
        monkeypatch.setenv(name, value)
    url = google_server.url(secrets.token_hex(8))
    copy_dataset(str(dataset), url)
    spec, weights = undisturbed
    spec = dataclasses.replace(in_store(spec, url, tmp_path / "cache"), run_dir=str(tmp_path / "run"))
    (result, *_) = ranks.run(2, train_with_environment, spec, dict(google_server.environment))
    assert result["weights_sha256"] == weights


def train_until_stopped(spec: RunSpec, environment: dict[str, str], stop_file: Path) -> dict[str, Any] | None:
    """``train_on_this_rank`` with one request to stop, as by Ctrl-C, once ``stop_file`` exists."""
    os.environ.update(environment)
    stop = StopRequest()

    def look() -> None:
        while not stop_file.exists():
            time.sleep(0.05)
        stop.made = True

    threading.Thread(target=look, daemon=True).start()
    return train_on_this_rank(spec, stop=stop)


def reading_in_each_step(spec: RunSpec, url: str, folder: Path) -> RunSpec:
    """The run in ``folder``, with a cache that keeps nothing, so that each step reads from the store; it saves at its end only."""
    spec = in_store(spec, url, folder / "cache", cache_gib=1e-9, read_ahead_mib=0.0)
    return dataclasses.replace(
        spec,
        run_dir=str(folder / "run"),
        checkpoint=dataclasses.replace(spec.checkpoint, every_steps=100),
        observe=dataclasses.replace(spec.observe, log_every_steps=1),
    )


@pytest.mark.slow
def test_one_request_to_stop_is_enough_while_a_store_is_away_and_the_step_before_is_saved(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec, weights = undisturbed
    spec = reading_in_each_step(spec, url, tmp_path)
    with faulty_proxy(s3_server.port, Faults(latency_s=0.2), seed=7) as proxy:

        def lose_the_store_and_ask() -> None:
            while steps_done(tmp_path / "run") < 1:
                time.sleep(0.02)
            proxy.upstream_port = 1  # nothing answers there
            (tmp_path / "asked").touch()

        thread = threading.Thread(target=lose_the_store_and_ask, daemon=True)
        thread.start()
        (result,) = ranks.run(1, train_until_stopped, spec, s3_server.behind(proxy.port), tmp_path / "asked")
        thread.join()
    assert result is None
    *_, stopped = (event.body for event in read_events(tmp_path / "run" / "events.jsonl"))
    assert isinstance(stopped, Stopped)
    assert stopped.step < 6, "it did not wait until the store was back"
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [stopped.step]
    # Elsewhere, since the process that has stopped lives on here, and its requests hold what they would write.
    spec = in_store(spec, url, tmp_path / "another cache")
    (result,) = ranks.run(1, train_with_environment, spec, dict(s3_server.environment))
    assert result["weights_sha256"] == weights


@pytest.mark.slow
def test_a_rank_whose_store_refuses_its_samples_saves_what_it_has_done_before_it_ends(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec, weights = undisturbed
    spec = reading_in_each_step(spec, url, tmp_path)
    with faulty_proxy(s3_server.port, Faults(latency_s=0.2), seed=7) as proxy:

        def refuse() -> None:
            while steps_done(tmp_path / "run") < 1:
                time.sleep(0.02)
            proxy.faults = Faults(denied="train-")

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        with pytest.raises(AssertionError, match="403 AccessDenied"):
            ranks.run(1, train_with_environment, spec, s3_server.behind(proxy.port))
        thread.join()
    done = steps_done(tmp_path / "run")
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [done]
    spec = in_store(spec, url, tmp_path / "another cache")
    (result,) = ranks.run(1, train_with_environment, spec, dict(s3_server.environment))
    assert result["weights_sha256"] == weights


def train_impatiently(
    spec: RunSpec, environments: Sequence[dict[str, str]], stop_file: Path
) -> dict[str, Any] | None:
    """``train_until_stopped`` with an environment for each rank, where a wait for samples is reported after half a second."""
    import torch.distributed as dist

    told_after_s = Prefetch.__init__.__kwdefaults__["told_first_s"]
    Prefetch.__init__.__kwdefaults__["told_first_s"] = 0.5
    try:
        return train_until_stopped(spec, environments[dist.get_rank()], stop_file)
    finally:
        Prefetch.__init__.__kwdefaults__["told_first_s"] = told_after_s


@pytest.mark.slow
def test_several_ranks_that_are_stopped_once_while_a_store_is_away_save_when_it_is_back_and_can_go_on(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec, weights = undisturbed
    spec = reading_in_each_step(spec, url, tmp_path)
    events = tmp_path / "run" / "events.jsonl"
    with faulty_proxy(s3_server.port, Faults(latency_s=0.2), seed=7) as proxy:

        def lose_the_store_ask_and_bring_it_back() -> None:
            while steps_done(tmp_path / "run") < 1:
                time.sleep(0.02)
            port, proxy.upstream_port = proxy.upstream_port, 1  # nothing answers there
            (tmp_path / "asked").touch()
            while " for samples from " not in events.read_text():
                time.sleep(0.05)
            proxy.upstream_port = port

        thread = threading.Thread(target=lose_the_store_ask_and_bring_it_back, daemon=True)
        thread.start()
        # The second rank loses nothing: it would wait in the first one's place, and the first, which reports, in a collective.
        environments = [s3_server.behind(proxy.port), dict(s3_server.environment)]
        results = ranks.run(2, train_impatiently, spec, environments, tmp_path / "asked")
        thread.join()
    assert results == [None, None]
    bodies = [event.body for event in read_events(events)]
    (waited, *_) = (body.text for body in bodies if isinstance(body, Message) and "for samples" in body.text)
    assert f"samples from {url}; the run waits until data.timeout_s = 1800 s are over" in waited
    assert isinstance(bodies[-1], Stopped)
    assert 1 <= bodies[-1].step < 6
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [bodies[-1].step]
    spec = in_store(spec, url, tmp_path / "another cache")  # as above
    (result, *_) = ranks.run(3, train_with_environment, spec, dict(s3_server.environment))
    assert result["weights_sha256"] == weights


@pytest.mark.slow
def test_eight_ranks_of_one_tensor_group_request_each_block_once(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec = in_store(undisturbed[0], url, tmp_path / "cache")
    spec = dataclasses.replace(
        spec,
        run_dir=str(tmp_path / "run"),
        model=dataclasses.replace(spec.model, heads=8, kv_heads=8),
        parallel=dataclasses.replace(spec.parallel, tensor=8),
        train=dataclasses.replace(spec.train, steps=2),
    )
    with faulty_proxy(s3_server.port, Faults(), seed=7) as proxy:
        ranks.run(8, train_with_environment, spec, s3_server.behind(proxy.port))
        blocks = {request: count for request, count in proxy.asked.items() if "range:" in request}
    assert len(blocks) > 1
    assert set(blocks.values()) == {1}


def test_the_place_of_the_dataset_belongs_to_the_fleet(undisturbed: tuple[RunSpec, str]) -> None:
    spec, _ = undisturbed
    assert identity(in_store(spec, "s3://bucket/set", Path("cache"), timeout_s=5.0)) == identity(spec)


def test_events_record_what_came_from_the_store_and_what_from_the_cache(
    ranks: Ranks, tmp_path: Path, url: str, s3_server: Server, undisturbed: tuple[RunSpec, str]
) -> None:
    spec = in_store(undisturbed[0], url, tmp_path / "cache")
    for name in ("first", "second"):
        ranks.run(
            1,
            train_with_environment,
            dataclasses.replace(spec, run_dir=str(tmp_path / name)),
            dict(s3_server.environment),
        )
    traffic = []
    for name in ("first", "second"):
        *_, last = (
            event.body
            for event in read_events(tmp_path / name / "events.jsonl")
            if isinstance(event.body, Step)
        )
        traffic.append(last.data_store)
        assert 0 <= last.data_wait_s <= last.logged_s
    assert traffic[0]["requests"] > 0
    assert traffic[0]["fetched_bytes"] > 0
    assert traffic[1]["asked_bytes"] == traffic[0]["asked_bytes"]
    assert (traffic[1]["requests"], traffic[1]["fetched_bytes"]) == (0, 0)


def test_settings_of_the_cache_are_refused_where_nothing_would_be_cached(
    undisturbed: tuple[RunSpec, str],
) -> None:
    (problem,) = check(replace_at(undisturbed[0], "data.cache", "/fast"))
    assert problem.path == "data.cache"
    assert "the run reads folders" in str(problem)

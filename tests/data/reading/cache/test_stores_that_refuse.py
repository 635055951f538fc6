"""Errors of a store that refuses or does not answer: the request, the credentials, the time, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data.making import write_dataset
from free_ports import free_port
from phalanx.data.errors import DatasetError
from phalanx.data.reading.cached_dataset import CachedShards, CacheOptions, cached_in, open_cached
from phalanx.data.stored.index import TRAIN
from phalanx.store.open_store import open_store
from phalanx.store.store import RetryPolicy
from store.memory_store import MemoryStore
from store.scripted_server import ScriptedServer, scripted
from store.servers import CREDENTIALS

DENIED = (403, b"<Error><Code>AccessDenied</Code><AWSAccessKeyId>AKIASECRET</AWSAccessKeyId></Error>")
BUSY = (503, b"<Error><Code>SlowDown</Code></Error>")
URL = "s3://bucket/set"
ANSWERED = RetryPolicy(retries=2, first_pause_s=0.005, longest_pause_s=1.0, timeout_s=5.0)
"""Long enough for an answer on a loaded machine: one that came too late would be another failure."""


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, bytes]:
    write_dataset(tmp_path / "set", [n % 257 for n in range(9000)])  # type: ignore[arg-type]
    return {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}


@contextmanager
def reached(monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes]) -> Iterator[ScriptedServer]:
    """A server that gives this answer to every request; the environment leads to it."""
    with scripted(forever=answer) as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_store_that_refuses_a_dataset_is_reported_with_the_request_and_the_credentials_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reached(monkeypatch, DENIED) as server, pytest.raises(DatasetError) as caught:
        open_cached(URL, CacheOptions(str(tmp_path / "cache")))
    assert f"403 AccessDenied on {URL}/index.json (GetObject): the credentials found" in str(caught.value)
    assert "source: environment, AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert len(server.requests) == len(set(server.requests)), "a refusal is not asked for again"


@pytest.mark.parametrize(
    ("answer", "message"), [(DENIED, "403 AccessDenied on"), (BUSY, "last: 503 SlowDown")]
)
def test_a_store_that_refuses_samples_or_is_too_busy_ends_the_reading_with_its_last_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: dict[str, bytes],
    answer: tuple[int, bytes],
    message: str,
) -> None:
    memory = MemoryStore(stored)
    with reached(monkeypatch, answer):
        remote = open_store(URL, ANSWERED)
        monkeypatch.setattr(memory, "ranges", remote.ranges)
        shards = CachedShards(cached_in(memory, memory, tmp_path / "cache", 1 << 30), TRAIN)
        with pytest.raises(DatasetError) as caught:
            shards.read(0, 100)
    assert message in str(caught.value)
    if answer == BUSY:
        assert "no success within 5 s" in str(caught.value)
        assert "training continues from its last checkpoint when the store responds again" in str(
            caught.value
        )
        assert "data.timeout_s limits the wait" in str(caught.value)


def test_a_store_that_nobody_answers_for_is_given_up_after_the_time_that_the_run_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DatasetError, match=rf"{URL}/index.json: no success within 0.3 s \(last: "):
        open_cached(URL, CacheOptions(str(tmp_path / "cache"), timeout_s=0.3))

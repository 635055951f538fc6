"""What a store does when servers and networks fail: what is tried again, what is said, and that nothing is done twice."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from free_ports import free_port
from phalanx.store.open_store import open_store
from phalanx.store.store import (
    DeniedError,
    ExistsError,
    ExpiredError,
    MissingBucketError,
    RetryPolicy,
    Store,
    StoreError,
    UnavailableError,
    UnconditionalStoreError,
    require_create,
)
from store.faulty_proxy import Faults, faulty_proxy
from store.scripted_server import scripted
from store.servers import CREDENTIALS, Server, google_environment, s3rver

PATIENT = RetryPolicy(retries=10, first_pause_s=0.005, longest_pause_s=0.05, timeout_s=240)
IMPATIENT = RetryPolicy(retries=2, first_pause_s=0.005, longest_pause_s=0.01, timeout_s=0.5)
ANSWERED = RetryPolicy(retries=2, first_pause_s=0.005, longest_pause_s=1.0, timeout_s=5)
"""Long enough for an answer on a loaded machine: one that came too late would be another failure."""


@contextmanager
def reached_at(environment: dict[str, str], url: str, retry: RetryPolicy) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield open_store(url, retry)


@contextmanager
def s3_at(port: int, retry: RetryPolicy) -> Iterator[Store]:
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with reached_at({**CREDENTIALS, **endpoint}, "s3://bucket/p", retry) as store:
        yield store


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("operation", ["get", "put", "create"])
def test_failures_that_pass_are_tried_again(status: int, operation: str) -> None:
    # More often than the library does by itself.
    with scripted([(status, b"")] * 12) as server, s3_at(server.port, PATIENT) as store:
        server.objects["/bucket/p/key"] = b"found"
        if operation == "get":
            assert store.get("key") == b"found"
        else:
            getattr(store, operation)("key", b"written")
            assert server.objects["/bucket/p/key"] == b"written"
        assert len(server.requests) == 13


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_failures_that_stay_are_not_tried_again(status: int) -> None:
    with scripted(forever=(status, b"")) as server, s3_at(server.port, PATIENT) as store:
        with pytest.raises(StoreError):
            store.get("key")
        assert len(server.requests) == 1


def test_a_refusal_names_the_request_and_the_source_of_the_credentials_and_no_secret() -> None:
    body = b"<Error><Code>AccessDenied</Code><AWSAccessKeyId>AKIASECRET</AWSAccessKeyId></Error>"
    with scripted(forever=(403, body)) as server, s3_at(server.port, PATIENT) as store:
        with pytest.raises(DeniedError) as caught:
            store.put("key", b"x")
        error_text = str(caught.value)
        assert "403 AccessDenied on s3://bucket/p/key (PutObject)" in error_text
        assert "source: environment, AWS_ACCESS_KEY_ID" in error_text
        assert "SECRET" not in error_text
        # Neither does a traceback show what the library said.
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_credentials_that_expired_are_waited_for(code: str) -> None:
    expired = 403, f"<Error><Code>{code}</Code></Error>".encode()
    with scripted([expired] * 3) as server, s3_at(server.port, PATIENT) as store:
        store.put("key", b"written")
        assert server.objects["/bucket/p/key"] == b"written"


def test_credentials_that_stay_expired_are_named_with_their_source() -> None:
    expired = 403, b"<Error><Code>ExpiredToken</Code></Error>"
    with (
        scripted(forever=expired) as server,
        s3_at(server.port, ANSWERED) as store,
        pytest.raises(
            ExpiredError, match=r"403 ExpiredToken .* AWS_ACCESS_KEY_ID\) have expired.*renew them"
        ),
    ):
        store.get("key")


def test_a_store_that_does_not_answer_is_given_up_after_the_policys_time() -> None:
    with (
        s3_at(free_port(), IMPATIENT) as store,
        pytest.raises(UnavailableError, match=r"within 0.5 s \(last: "),
    ):
        store.get("key")


def test_the_last_answer_of_a_store_that_is_given_up_is_said() -> None:
    busy = (503, b"<Error><Code>SlowDown</Code></Error>")
    with (
        scripted(forever=busy) as server,
        s3_at(server.port, ANSWERED) as store,
        pytest.raises(UnavailableError, match="503 SlowDown"),
    ):
        store.get("key")


def test_a_missing_bucket_is_told_from_a_missing_object(s3_server: Server) -> None:
    with reached_at(dict(s3_server.environment), "s3://nobucket/p", PATIENT) as store:
        for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list())):
            with pytest.raises(MissingBucketError, match="nobucket"):
                call()


def test_a_store_that_ignores_conditions_fails_the_probe() -> None:
    with (
        scripted() as server,
        s3_at(server.port, PATIENT) as store,
        pytest.raises(UnconditionalStoreError, match="ignores If-None-Match: two attempts could both commit"),
    ):
        require_create(store, "probe")


def test_an_object_of_google_is_created_on_the_condition_that_it_has_no_generation_yet() -> None:
    with (
        scripted([(412, b"")]) as server,
        reached_at(google_environment(server.port), "gs://bucket/p", PATIENT) as store,
    ):
        server.objects["/bucket/p%2Fcommit"] = b"theirs"
        with pytest.raises(ExistsError):
            store.create("commit", b"ours")
        assert server.conditions == ["0", None], "a create, and the look at what is there"
        store.create("another", b"ours")
        assert server.objects["/bucket/p%2Fanother"] == b"ours"


@pytest.mark.slow
def test_fake_gcs_server_which_ignores_conditions_fails_the_probe(google_server: Server) -> None:
    with (
        reached_at(dict(google_server.environment), google_server.url("p"), PATIENT) as store,
        pytest.raises(UnconditionalStoreError, match="ignores If-None-Match"),
    ):
        require_create(store, "probe")


@pytest.mark.slow
def test_s3rver_which_ignores_conditions_fails_the_probe(tmp_path: Path) -> None:
    with (
        s3rver(tmp_path / "s3rver") as server,
        reached_at(dict(server.environment), server.url("p"), PATIENT) as store,
        pytest.raises(UnconditionalStoreError, match="ignores If-None-Match"),
    ):
        require_create(store, "probe")


def through_faults(server: Server, faults: Faults, seed: int) -> Iterator[Store]:
    with faulty_proxy(server.port, faults, seed) as proxy:
        environment, url = server.behind(proxy.port), server.url(secrets.token_hex(8))
        with reached_at(environment, url, PATIENT) as store:
            yield store


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_through_a_bad_network_all_reads_are_right_and_creates_happen_once(
    s3_server: Server, seed: int
) -> None:
    faults = Faults(slow_down=0.1, reset=0.1, lost_answer=0.15, truncated=0.1, latency_s=0.002)
    with contextmanager(through_faults)(s3_server, faults, seed) as store:
        data = bytes((seed + 7 * i) % 251 for i in range(300_000))
        store.put("data", data)
        spans = [(i, i + 17) for i in range(0, 290_000, 80_000)]

        def read(_: int) -> bool:
            return [bytes(view) for view in store.ranges("data", spans)] == [data[a:b] for a, b in spans]

        def create(number: int) -> int | None:
            try:
                store.create("commit", b"%d" % number)
            except ExistsError:
                return None
            return number

        with ThreadPoolExecutor(4) as pool:
            reads, winners = pool.map(read, range(6)), list(pool.map(create, range(4)))
            assert all(reads)
        assert [w for w in winners if w is not None] == [int(store.get("commit"))]
        assert store.get("data") == data
        assert sorted(info.key for info in store.list()) == ["commit", "data"]
        store.delete(["data", "commit"])
        assert list(store.list()) == []


@pytest.mark.slow
def test_ten_thousand_records_through_a_network_with_a_long_tail_are_all_right(s3_server: Server) -> None:
    # A median of 50 ms, of which one answer in five hundred is two seconds late; a twentieth is refused, a hundredth reset, another cut off.
    faults = Faults(slow_down=0.05, reset=0.01, truncated=0.01, latency_s=0.072, late=0.002)
    record, generator = 32 << 10, random.Random(5)
    data = generator.randbytes(8 << 20)
    starts = [generator.randrange(len(data) - record) for _ in range(10_000)]
    with contextmanager(through_faults)(s3_server, faults, 5) as store:
        store.put("data", data)
        with ThreadPoolExecutor(32) as pool:
            views = pool.map(lambda start: store.ranges("data", [(start, start + record)])[0], starts)
            assert all(
                view == data[start : start + record] for view, start in zip(views, starts, strict=True)
            )


def test_an_upload_in_parts_survives_lost_answers(s3_server: Server) -> None:
    faults = Faults(slow_down=0.15, reset=0.1, lost_answer=0.2)
    data = bytes(range(256)) * (72 << 12)
    with contextmanager(through_faults)(s3_server, faults, 1) as store:
        store.put("large", data)
        assert store.get("large") == data


def test_a_slow_link_is_waited_for(s3_server: Server) -> None:
    with contextmanager(through_faults)(s3_server, Faults(bytes_per_s=4e6, latency_s=0.02), 0) as store:
        store.put("data", bytes(1 << 20))
        assert store.get("data") == bytes(1 << 20)

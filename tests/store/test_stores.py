"""The contract of a store: the same tests on a folder, on S3 (ministack) and, in the long suite, on Azure (azurite) and Google Cloud Storage (fake-gcs-server)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.store.obstore_adapter import joined_spans
from phalanx.store.open_store import open_store
from phalanx.store.store import (
    MOST_CREATED_BYTES,
    BadUrlError,
    ExistsError,
    MissingObjectError,
    ShortObjectError,
    Store,
    require_create,
)
from store.servers import Server, azurite

MIB = 1 << 20


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


SERVERS = {"s3": "s3_server", "az": "azure_server", "gs": "google_server"}


@pytest.fixture(
    params=["file", "path", "s3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("az", "gs"))]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place of each kind."""
    if request.param == "file":
        return f"file://{tmp_path}/a%20b/objects"
    if request.param == "path":
        return str(tmp_path / "objects")
    server: Server = request.getfixturevalue(SERVERS[request.param])
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.url(secrets.token_hex(8))


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


@pytest.fixture
def conditions_and_parts(url: str) -> None:
    """Leaves out what fake-gcs-server has not: conditions on a PUT, and uploads in parts."""
    if url.startswith("gs:"):
        pytest.skip("fake-gcs-server takes neither conditions nor uploads in parts")


def keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def test_what_was_put_is_read_and_replaced(store: Store) -> None:
    store.put("a/b.bin", b"first")
    assert store.get("a/b.bin") == b"first"
    store.put("a/b.bin", memoryview(b"second"))
    assert store.get("a/b.bin") == b"second"
    store.put("empty", b"")
    assert store.get("empty") == b""


def test_keys_with_blanks_signs_and_letters_of_any_script_come_back_as_they_are(store: Store) -> None:
    wanted = ["a b/c+d", "p%20q", "ünï/ключ", "x=1&y=2"]
    for key in wanted:
        store.put(key, key.encode())
    assert keys(store) == sorted(wanted)
    assert [store.get(key).decode() for key in wanted] == wanted


def test_ranges_give_the_bytes_of_each_span_in_the_order_asked(store: Store) -> None:
    data = bytes(range(256)) * 1024
    store.put("data", data)
    spans = [(0, 10), (200_000, 200_007), (5, 5), (90_000, 90_001), (0, len(data)), (3, 9)]
    assert [bytes(view) for view in store.ranges("data", spans)] == [data[a:b] for a, b in spans]
    assert store.ranges("data", []) == []


def test_an_object_alone_is_described_as_its_listing_does(store: Store) -> None:
    store.put("a/one", b"12345")
    (listed,) = store.list("a")
    found = store.info("a/one")
    assert (found.key, found.nbytes, found.etag) == (listed.key, 5, listed.etag)
    for key in ("a/two", "a"):
        with pytest.raises(MissingObjectError):
            store.info(key)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 3)).map(
            lambda span: (span[0] << 10, (span[0] + span[1]) << 10)
        )
    )
)
def test_joined_spans_hold_every_span_in_one_piece_and_lie_at_least_64_kib_apart(
    spans: list[tuple[int, int]],
) -> None:
    starts, stops = joined_spans(spans)
    for a, b in spans:
        assert a == b or any(start <= a and b <= stop for start, stop in zip(starts, stops, strict=True))
    assert all(start - stop >= 64 << 10 for stop, start in zip(stops[:-1], starts[1:], strict=True))


@pytest.mark.parametrize("span", [(3, 9), (6, 7), (100, 200)])
def test_a_span_behind_the_end_is_an_error_and_never_fewer_bytes(store: Store, span: tuple[int, int]) -> None:
    store.put("data", b"12345")
    with pytest.raises(ShortObjectError, match=r"data.* ends"):
        store.ranges("data", [(0, 5), span])


def test_a_missing_object_is_named_with_its_url(store: Store) -> None:
    for read in (lambda: store.get("not/there"), lambda: store.ranges("not/there", [(0, 1)])):
        with pytest.raises(MissingObjectError) as caught:
            read()
        assert caught.value.url == f"{store.url}/not/there"
        assert caught.value.url in str(caught.value)


@pytest.mark.usefixtures("conditions_and_parts")
def test_an_object_is_created_once_and_then_refused_without_change(store: Store) -> None:
    store.create("commit/1", b"mine")
    with pytest.raises(ExistsError, match="commit/1"):
        store.create("commit/1", b"theirs")
    assert store.get("commit/1") == b"mine"


def test_creating_what_is_there_with_equal_bytes_is_success(store: Store) -> None:
    store.create("commit/1", b"mine")
    store.create("commit/1", b"mine")


@pytest.mark.usefixtures("conditions_and_parts")
def test_of_racing_creators_exactly_one_wins(store: Store) -> None:
    racers = 8
    together = Barrier(racers)

    def race(number: int) -> bool:
        together.wait()
        try:
            store.create("commit", b"%d" % number)
        except ExistsError:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    assert won.count(True) == 1
    assert store.get("commit") == b"%d" % won.index(True)


def test_what_is_too_large_for_one_request_is_not_created(store: Store) -> None:
    with pytest.raises(ValueError, match="too many"):
        store.create("large", bytes(MOST_CREATED_BYTES + 1))
    store.create("large", bytes(MOST_CREATED_BYTES))


def test_a_listing_holds_what_lies_below_whole_segments(store: Store) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "a/b.4"):
        store.put(key, key.encode())
    assert keys(store) == ["a/1", "a/b.4", "a/b/2", "ab/3"]
    assert keys(store, "a") == ["a/1", "a/b.4", "a/b/2"]
    assert keys(store, "a/b") == ["a/b/2"]
    assert keys(store, "nothing") == []
    (info,) = store.list("ab")
    assert (info.nbytes, bool(info.etag), info.modified.tzinfo is not None) == (4, True, True)


def test_a_listing_goes_on_behind_its_first_page_of_a_thousand(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:04d}", b""), range(1050)))
    assert keys(store, "many") == [f"many/{number:04d}" for number in range(1050)]
    store.delete(f"many/{number:04d}" for number in range(1, 1050))
    assert keys(store) == ["many/0000"]


def test_deleting_takes_what_is_named_and_does_not_mind_what_is_not_there(store: Store) -> None:
    for key in ("a/1", "a/2", "b"):
        store.put(key, b"x")
    store.delete(["a/1", "a/none", "b", "no/such/folder"])
    assert keys(store) == ["a/2"]
    store.delete([])
    store.put("a/1/x", b"a folder may follow an object of its name")
    assert keys(store) == ["a/1/x", "a/2"]


@pytest.mark.usefixtures("conditions_and_parts")
def test_puts_and_deletes_in_one_folder_at_once_do_not_disturb_each_other(store: Store) -> None:
    def put_and_delete(writer: int) -> None:
        for _ in range(20):
            store.put(f"a/b/c/{writer}", b"x")
            store.delete([f"a/b/c/{writer}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put_and_delete, range(4)))
    assert keys(store) == []


@pytest.mark.usefixtures("conditions_and_parts")
def test_a_large_object_goes_up_in_parts_and_comes_back_whole(store: Store) -> None:
    blocks = [bytes([number]) * (6 * MIB) for number in range(4)]
    store.put_blocks("streamed", (memoryview(block) for block in blocks), 24 * MIB)
    assert [info.nbytes for info in store.list()] == [24 * MIB]
    assert store.get("streamed") == b"".join(blocks)


@pytest.mark.usefixtures("conditions_and_parts")
@pytest.mark.parametrize("nbytes", [10, 24 * MIB])
def test_an_upload_whose_source_fails_leaves_nothing_and_raises_what_the_source_raised(
    store: Store, nbytes: int
) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(nbytes // 2)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        store.put_blocks("half", broken(), nbytes)
    assert keys(store) == []


@pytest.mark.usefixtures("conditions_and_parts")
def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    require_create(store, "probe/1")
    assert keys(store) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", "./a", "a\nb"])
def test_a_key_that_is_no_plain_path_is_refused(store: Store, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b"x"),
        lambda: store.get(key),
        lambda: store.create(key, b"x"),
        lambda: store.delete([key]),
        lambda: store.ranges(key, [(0, 1)]),
    ]
    for call in calls:
        with pytest.raises(BadUrlError, match="no key"):
            call()

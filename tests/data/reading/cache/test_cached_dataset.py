"""A dataset in an object store gives the tokens of the same dataset in a folder, after any damage in the cache or on the way."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.making import write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.reading.cached_dataset import CachedDataset, CachedShards, cached_in
from phalanx.data.reading.cached_shard import fetched_bytes, most_ahead_bytes
from phalanx.data.stored.index import HELD_OUT, TRAIN
from phalanx.data.stored.shard_writer import BLOCK_BYTES
from phalanx.data.stored.shards import TokenShards
from phalanx.data.tokenizers.tokenizer import train_bpe
from phalanx.store.store import UnavailableError
from store.memory_store import MemoryStore

BLOCK_TOKENS = BLOCK_BYTES // 2
STREAM = np.random.default_rng(0).integers(0, 257, 10 * BLOCK_TOKENS + 999)
SHARD_TOKENS = 4 * BLOCK_TOKENS + 500
"""Shards end within a block."""
MUCH = 1 << 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored") / "set"
    write_dataset(directory, STREAM, held_out=STREAM[:3000], shard_tokens=SHARD_TOKENS)
    return directory


def stored(dataset: Path) -> MemoryStore:
    return MemoryStore({path.name: path.read_bytes() for path in dataset.iterdir()})


def opened(store: MemoryStore, root: Path, limit_bytes: int = MUCH) -> CachedDataset:
    return cached_in(store, store, root, limit_bytes)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def samples(shards: CachedShards | TokenShards, starts: list[int], length: int) -> list[list[int]]:
    out = np.empty((len(starts), length), dtype=np.int64)
    shards.gather(np.array(starts, dtype=np.int64), length, out, np.arange(len(starts)))
    return out.tolist()


def expected(starts: list[int], length: int) -> list[list[int]]:
    return [STREAM[start : start + length].tolist() for start in starts]


def harmed(folder: Path, harm: str, seed: int) -> None:
    """Damage a file of the cache as a disk, a kill or another process might."""
    draw = np.random.default_rng(seed)
    files = sorted(folder.glob("train-*"))
    if not files:
        return
    file = files[draw.integers(len(files))]
    size = file.stat().st_size
    if harm == "flip" and size:
        file.write_bytes(flipped(file.read_bytes(), int(draw.integers(size))))
    elif harm == "cut":
        os.truncate(file, int(draw.integers(size + 1)))
    elif harm == "empty":
        os.truncate(file, 0)
    elif harm == "remove":
        file.unlink()


@given(
    reads=st.lists(
        st.tuples(
            st.lists(st.integers(0, len(STREAM) - 2 * BLOCK_TOKENS), max_size=4),
            st.sampled_from([1, 100, BLOCK_TOKENS, 2 * BLOCK_TOKENS]),
            st.sampled_from(["", "flip", "cut", "empty", "remove", "reopen"]),
            st.integers(0, 99),
        ),
        max_size=8,
    )
)
@settings(max_examples=40, deadline=None)
def test_the_tokens_read_are_the_folders_after_any_damage_to_the_cache(
    dataset: Path,
    tmp_path_factory: pytest.TempPathFactory,
    reads: list[tuple[list[int], int, str, int]],
) -> None:
    root, store = tmp_path_factory.mktemp("root"), stored(dataset)
    cache = opened(store, root)
    shards = CachedShards(cache, TRAIN)
    for starts, length, harm, seed in reads:
        assert samples(shards, starts, length) == expected(starts, length)
        harmed(cache.folder, harm, seed)
        if harm == "reopen":
            shards = CachedShards(opened(store, root), TRAIN)
    shutil.rmtree(root)


def test_reading_a_stretch_gives_the_folders_tokens_across_shards_and_in_both_splits(
    dataset: Path, tmp_path: Path
) -> None:
    cache = opened(stored(dataset), tmp_path)
    for split in (TRAIN, HELD_OUT):
        here, there = TokenShards.open(dataset, split), CachedShards(cache, split)
        assert there.tokens == here.tokens
        assert not there.unchecked
        stretch = there.read(7, here.tokens)
        assert stretch.dtype == here.dtype
        assert stretch.tolist() == here.read(7, here.tokens).tolist()
        with pytest.raises(IndexError):
            there.read(0, here.tokens + 1)


def test_fetched_blocks_are_not_requested_again_by_later_processes(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    samples(CachedShards(opened(store, tmp_path), TRAIN), [5, 20_000], 600)
    store.read_bytes = 0
    again = opened(store, tmp_path)
    assert samples(CachedShards(again, TRAIN), [5, 20_000], 600) == expected([5, 20_000], 600)
    assert store.read_bytes == 0
    assert (again.traffic.asked_bytes, again.traffic.fetched_bytes) == (2 * 1200, 0)


def test_only_the_blocks_of_a_sample_are_fetched(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    samples(CachedShards(opened(store, tmp_path), TRAIN), [BLOCK_TOKENS - 10], 20)
    assert store.read_bytes == 2 * BLOCK_BYTES


def test_one_of_many_readers_that_miss_a_block_at_once_fetches_it(dataset: Path, tmp_path: Path) -> None:
    # Each has opened the cache for itself, as processes do; locks of open file descriptions exclude these as they do processes.
    store, requests = stored(dataset), []

    def slowly(operation: str, key: str) -> None:
        if operation == "ranges" and key.endswith(".bin"):
            requests.append(key)
            time.sleep(0.1)

    store.before = slowly
    readers = [CachedShards(opened(store, tmp_path), TRAIN) for _ in range(8)]
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda reader=reader: results.append(samples(reader, [5], 600)))
        for reader in readers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected([5], 600)] * 8
    assert len(requests) == 1


def test_a_block_with_a_bit_that_flips_on_the_way_is_requested_again(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    shards = CachedShards(opened(store, tmp_path), TRAIN)
    intact, request_count = dict(store.objects), 0

    def flip_the_first(operation: str, key: str) -> None:
        nonlocal request_count
        if operation == "ranges" and key.endswith(".bin"):
            request_count += 1
            store.objects[key] = flipped(intact[key], 100) if request_count == 1 else intact[key]

    store.before = flip_the_first
    assert samples(shards, [5], 600) == expected([5], 600)
    assert request_count == 2


def test_a_byte_that_the_store_has_wrong_is_named_and_never_handed_out(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    store.objects["train-00001.bin"] = flipped(store.objects["train-00001.bin"], BLOCK_BYTES + 17)
    shards = CachedShards(opened(store, tmp_path), TRAIN)
    before = samples(shards, [SHARD_TOKENS], 100)
    assert before == expected([SHARD_TOKENS], 100)
    with pytest.raises(
        DatasetError,
        match=r"memory://store/train-00001\.bin: bytes 8192 to 16384 are not what was written.*data copy",
    ):
        samples(shards, [SHARD_TOKENS + BLOCK_TOKENS], 100)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("index.json", None, r"memory://store holds no index\.json; correct the URL"),
        ("index.json", b"{", r"memory:/store/index\.json is damaged"),
        ("tokenizer.json", None, r"holds no tokenizer\.json"),
        (
            "train-00000.sums",
            None,
            r"train-00000\.sums is not there, and without block sums nothing.*--write-sums",
        ),
        (
            "train-00000.sums",
            b"torn",
            r"memory://store/train-00000\.sums holds no block sums of train-00000\.bin",
        ),
        ("train-00000.bin", None, r"train-00000\.bin: there is no such object.*data copy"),
        ("train-00000.bin", b"short", r"train-00000\.bin: ends before.*data copy"),
    ],
)
def test_what_is_missing_or_torn_in_the_store_is_named_with_its_remedy(
    dataset: Path, tmp_path: Path, name: str, change: bytes | None, message: str
) -> None:
    store = stored(dataset)
    del store.objects[name]
    if change is not None:
        store.objects[name] = change
    with pytest.raises(DatasetError, match=message):
        samples(CachedShards(opened(store, tmp_path), TRAIN), [0], 10)


def test_another_dataset_under_the_same_url_has_another_cached(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    first = opened(store, tmp_path / "root")
    write_dataset(tmp_path / "other", STREAM[::-1], shard_tokens=SHARD_TOKENS)
    second = opened(stored(tmp_path / "other"), tmp_path / "root")
    assert first.folder != second.folder
    assert samples(CachedShards(second, TRAIN), [0], 50) == [STREAM[::-1][:50].tolist()]


def test_a_dataset_that_was_opened_before_can_be_opened_while_its_store_does_not_answer(
    dataset: Path, tmp_path: Path
) -> None:
    store = stored(dataset)
    samples(CachedShards(opened(store, tmp_path), TRAIN), [5], 600)

    def refuse(_operation: str, key: str) -> None:
        raise UnavailableError(f"{key}: has not answered for 3 s", key, "get")

    store.before = refuse
    assert samples(CachedShards(opened(store, tmp_path), TRAIN), [5], 600) == expected([5], 600)
    with pytest.raises(UnavailableError, match="has not answered"):
        opened(store, tmp_path / "another")


def test_an_index_that_a_power_failure_tore_in_the_cache_is_not_taken_and_is_made_good_again(
    dataset: Path, tmp_path: Path
) -> None:
    store = stored(dataset)
    torn = opened(store, tmp_path).folder / "index.json"
    torn.write_bytes(b"")

    def refuse(_operation: str, key: str) -> None:
        raise UnavailableError(f"{key}: has not answered for 3 s", key, "get")

    store.before = refuse
    with pytest.raises(UnavailableError, match=r"index\.json: has not answered"):
        opened(store, tmp_path)
    store.before = lambda _operation, _key: None
    opened(store, tmp_path)
    assert torn.read_bytes() == store.objects["index.json"]


def test_the_first_opening_requests_the_index_and_the_tokenizers_files_at_once(
    dataset: Path, tmp_path: Path
) -> None:
    store, all_three = stored(dataset), threading.Barrier(3)
    store.before = lambda _operation, _key: all_three.wait(30) and None
    opened(store, tmp_path)
    requests: list[str] = []
    store.before = lambda _operation, key: requests.append(key)
    opened(store, tmp_path)
    assert requests == ["index.json"], "the others are here"


def test_a_tokenizer_that_came_with_another_dataset_meanwhile_is_never_kept(
    dataset: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    train_bpe(["other words than these"], vocab_size=270).save(tokenizer)
    theirs = {path.name: path.read_bytes() for path in tokenizer.iterdir()}
    ours = stored(dataset).objects
    store = MemoryStore(ours | theirs)
    with pytest.raises(DatasetError, match=r"memory://store is not the one .*try again once it is whole"):
        opened(store, tmp_path / "root")
    # The files requested beside the index were the other dataset's; at the second request they are this one's.
    requests: list[str] = []

    def replace_after_three(_operation: str, key: str) -> None:
        requests.append(key)
        store.objects = ours if len(requests) > 3 else ours | theirs

    store.before = replace_after_three
    cache = opened(store, tmp_path / "root")
    assert sorted(requests) == sorted(["index.json", *theirs, *theirs])
    assert {name: (cache.folder / name).read_bytes() for name in theirs} == {
        name: ours[name] for name in theirs
    }


@pytest.mark.parametrize("harm", ["cut", "empty", "remove", "another"])
def test_a_tokenizer_that_was_lost_or_changed_in_the_cache_is_requested_again(
    dataset: Path, tmp_path: Path, harm: str
) -> None:
    store = stored(dataset)
    folder = opened(store, tmp_path).folder
    if harm == "another":
        train_bpe(["other words than these"], vocab_size=270).save(folder)
    elif harm == "remove":
        (folder / "tokenizer.json").unlink()
    else:
        os.truncate(folder / "tokenizer_config.json", 7 if harm == "cut" else 0)
    opened(store, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == store.objects[name]


def test_a_cache_stays_below_its_limit_and_what_it_drops_is_read_again(dataset: Path, tmp_path: Path) -> None:
    limit_bytes = 5 * BLOCK_BYTES
    shards = CachedShards(opened(stored(dataset), tmp_path, limit_bytes), TRAIN)
    for start in [*range(0, len(STREAM) - 100, BLOCK_TOKENS)] * 2:
        assert samples(shards, [start], 100) == expected([start], 100)
        held_bytes = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*/*.bin"))
        assert held_bytes <= limit_bytes


def test_a_cache_that_cannot_be_written_does_not_stop_reading(dataset: Path, tmp_path: Path) -> None:
    import resource

    store = stored(dataset)
    shards = CachedShards(opened(store, tmp_path), TRAIN)
    samples(shards, [0], 10)  # opens the first shard
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = _ignore_file_size_signal()
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, hard))  # as a full disk
    try:
        assert samples(shards, [2 * BLOCK_TOKENS], 100) == expected([2 * BLOCK_TOKENS], 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        before()


def test_a_cache_that_is_full_before_the_first_sample_does_not_stop_reading(
    dataset: Path, tmp_path: Path
) -> None:
    import resource

    shards = CachedShards(opened(stored(dataset), tmp_path), TRAIN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = _ignore_file_size_signal()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no room for block sums
    try:
        assert samples(shards, [0, 5], 100) == expected([0, 5], 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        before()


def test_a_cache_that_cannot_be_read_does_not_stop_reading(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = CachedShards(opened(stored(dataset), tmp_path), TRAIN)
    samples(shards, [0], 100)

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    assert samples(shards, [0], 100) == expected([0], 100)


def _ignore_file_size_signal() -> Callable[[], object]:
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGXFSZ, handler)


def test_what_is_read_ahead_is_there_when_it_is_needed(dataset: Path, tmp_path: Path) -> None:
    store = stored(dataset)
    cached = opened(store, tmp_path)
    shards = CachedShards(cached, TRAIN)
    starts = [0, 5000, 17_000, 39_000]
    shards.read_ahead(np.array(starts), 400)
    pieces = shards._pieces(np.array(starts), 400, np.zeros(len(starts), np.int64))
    deadline_s = time.monotonic() + 100
    while any(
        (shard := shards._open_already(piece.number)) is None
        or shard.held(piece.start_bytes, piece.stop_bytes) is None
        for piece in pieces
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    store.read_bytes = 0
    assert samples(shards, starts, 400) == expected(starts, 400)
    assert store.read_bytes == 0


def test_a_failure_of_what_is_read_ahead_is_reported_only_when_it_is_needed(
    dataset: Path, tmp_path: Path
) -> None:
    store = stored(dataset)
    shards = CachedShards(opened(store, tmp_path), TRAIN)

    def refuse(_operation: str, key: str) -> None:
        raise UnavailableError(f"{key}: has not answered for 3 s", key, "ranges")

    store.before = refuse
    shards.read_ahead(np.array([0]), 10)
    with pytest.raises(
        DatasetError,
        match=r"has not answered for 3 s; training continues from its last checkpoint.*data\.timeout_s",
    ):
        samples(shards, [0], 10)
    store.before = lambda _operation, _key: None
    assert samples(shards, [0], 10) == expected([0], 10)


def test_a_reader_that_waits_for_a_store_that_does_not_answer_can_be_made_to_give_up(
    dataset: Path, tmp_path: Path
) -> None:
    store = stored(dataset)
    cache = opened(store, tmp_path)
    waiting, answer = threading.Event(), threading.Event()

    def hang(_operation: str, _key: str) -> None:
        waiting.set()
        answer.wait(30)

    store.before = hang
    failed: list[BaseException] = []

    def read() -> None:
        try:
            samples(CachedShards(cache, TRAIN), [0], 10)
        except DatasetError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waiting.wait(30)
    assert 0 < cache.requests.waiting_s() < 30
    cache.requests.give_up()
    reader.join(30)
    answer.set()
    assert [str(error) for error in failed] == ["reading was ended before the store had answered"]
    assert cache.requests.waiting_s() == 0
    store.before = lambda _operation, _key: None
    assert samples(CachedShards(cache, TRAIN), [0], 10) == expected([0], 10)


@given(start=st.integers(0, 1 << 40), nbytes=st.integers(1, 1 << 20))
def test_a_sample_fetches_at_most_one_block_more_than_the_mean_that_read_ahead_counts_with(
    start: int, nbytes: int
) -> None:
    blocks = (start + nbytes - 1) // BLOCK_BYTES - start // BLOCK_BYTES + 1
    # As much less only for whole blocks that begin where one does.
    assert -BLOCK_BYTES <= blocks * BLOCK_BYTES - fetched_bytes(nbytes) < BLOCK_BYTES


def test_what_is_read_ahead_in_bounds_is_still_there_when_it_is_needed(dataset: Path, tmp_path: Path) -> None:
    """A cache for two thirds of the data, read twice in random order, with as much read ahead as one process may."""
    limit_bytes = 6 * BLOCK_BYTES
    store = stored(dataset)
    shards = CachedShards(opened(store, tmp_path, limit_bytes), TRAIN)
    rng = np.random.default_rng(3)
    starts = [int(start) for start in rng.permutation(len(STREAM) - 200)[:200]]
    ahead = most_ahead_bytes(MUCH, limit_bytes) // fetched_bytes(400)
    store.read_bytes = 0
    for number, start in enumerate(starts):
        shards.read_ahead(np.array(starts[number : number + ahead]), 200)
        assert samples(shards, [start], 200) == expected([start], 200)
    asked_bytes = len(starts) * fetched_bytes(400)
    assert store.read_bytes < asked_bytes

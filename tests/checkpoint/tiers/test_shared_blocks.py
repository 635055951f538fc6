"""Ranks of one machine that restore together fetch each block once; shared blocks are neither wrong nor left behind."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.worlds import State, box_of, same_bits, save_state
from phalanx.checkpoint.committed.copying import copy_step
from phalanx.checkpoint.committed.restore import Shard, restore
from phalanx.checkpoint.format.manifest import Manifest, checksum
from phalanx.checkpoint.tiers import object_tier
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier, SharedBlocks
from store.memory_store import MemoryStore

BLOCK_BYTES = 4096


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is shared, for this test alone."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(object_tier, "memory_folder", lambda: place)
    return place


def stored(folder: Path) -> tuple[MemoryStore, State, Counter[str]]:
    """A checkpoint in a store, its state, and how often each block is requested from now on."""
    disk, state = (
        DiskTier(folder, block_bytes=BLOCK_BYTES),
        {f"model/{i}": torch.randn(3000) for i in range(9)},
    )
    save_state(disk, 1, state)
    store, requests = MemoryStore(), Counter[str]()
    copy_step(disk, 1, ObjectTier(store))
    ranges = store.ranges

    def counted(key: str, spans: list[tuple[int, int]]) -> list[memoryview]:
        requests.update(f"{key} {span}" for span in spans)
        return ranges(key, spans)

    store.ranges = counted  # type: ignore[method-assign,assignment]
    return store, state, requests


def restored(tier: ObjectTier, state: State) -> State:
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    restore(tier, 1, [Shard(box_of(name, tensor), tensor) for name, tensor in blank.items()])
    return blank


def test_equal_ranks_that_restore_at_once_fetch_each_block_once(tmp_path: Path, folder: Path) -> None:
    store, state, requests = stored(tmp_path / "disk")
    all_have_restored = Barrier(4)

    def rank(_: int) -> State:
        tier = ObjectTier(store)
        with tier.shared_on_this_machine():
            weights = restored(tier, state)
            all_have_restored.wait(60)
        return weights

    with ThreadPoolExecutor(4) as pool:
        for weights in pool.map(rank, range(4)):
            assert all(same_bits(weights[name], state[name]) for name in state)
    assert len(requests) > 20
    assert set(requests.values()) == {1}
    assert list(folder.iterdir()) == [], "the last one has removed the file"


def test_ranks_that_do_not_restore_together_fetch_for_themselves(tmp_path: Path) -> None:
    store, state, requests = stored(tmp_path / "disk")
    for _ in range(2):
        restored(ObjectTier(store), state)
    assert set(requests.values()) == {2}


def test_what_is_shared_is_believed_by_its_checksum_alone(tmp_path: Path, folder: Path) -> None:
    store, state, requests = stored(tmp_path / "disk")
    first, second = ObjectTier(store), ObjectTier(store)
    with first.shared_on_this_machine(), second.shared_on_this_machine():
        restored(first, state)
        (file,) = folder.iterdir()
        assert file.stat().st_mode & 0o077 == 0
        with file.open("r+b") as content:
            content.seek(os.lseek(content.fileno(), 0, os.SEEK_DATA) + 10)
            content.write(b"other bytes")
        weights = restored(second, state)
    assert all(same_bits(weights[name], state[name]) for name in state)
    assert sorted(requests.values())[-2:] == [1, 2], "one block was fetched again"


def test_where_there_is_no_room_each_rank_fetches_for_itself(tmp_path: Path, folder: Path) -> None:
    store, state, requests = stored(tmp_path / "disk")
    folder.rmdir()
    with ExitStack() as resources:
        for _ in range(2):
            tier = ObjectTier(store)
            resources.enter_context(tier.shared_on_this_machine())
            assert all(same_bits(value, state[name]) for name, value in restored(tier, state).items())
    assert set(requests.values()) == {2}


def test_files_of_a_killed_rank_are_removed_by_the_next_restore_and_files_in_use_are_not(
    tmp_path: Path, folder: Path
) -> None:
    in_use = SharedBlocks("s3://bucket/held", folder)
    left = folder / f"phalanx-restore-{os.getuid()}-left"
    left.write_bytes(b"blocks")
    strange = folder / f"phalanx-restore-{os.getuid()}-strange"
    strange.symlink_to(tmp_path)
    SharedBlocks("s3://bucket/other", folder).close()
    assert sorted(folder.iterdir()) == sorted([in_use._path, strange])
    in_use.close()


def test_a_file_that_another_user_holds_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = hashlib.sha256(b"s3://bucket").hexdigest()[:32]
    me = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: me)
    mine = folder / f"phalanx-restore-{me}-{mark}"
    mine.touch()
    blocks = list[SharedBlocks]()
    with mine.open("r+b") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opening = Thread(target=lambda: blocks.append(SharedBlocks("s3://bucket", folder)), daemon=True)
        opening.start()
        opening.join(60)
        assert blocks, "it waits for another user's lock"
    manifest = Manifest(0, "rank-0", 4, 64, (checksum(b"mine"),), ())
    assert bytes(blocks[0].block(manifest, 0, lambda: memoryview(b"mine"))) == b"mine"
    assert not mine.stat().st_size, "nothing of ours is left in it"


def test_ranks_that_find_other_room_look_for_blocks_at_the_same_places(folder: Path) -> None:
    image = bytes(range(256)) * 2
    blocks = [memoryview(image)[start : start + 64] for start in range(0, len(image), 64)]
    manifest = Manifest(0, "rank-0", len(image), 64, tuple(map(checksum, blocks)), ())
    fetched: Counter[int] = Counter()

    def fetch(number: int) -> memoryview:
        fetched[number] += 1
        return blocks[number]

    with ExitStack() as resources:
        ranks = [SharedBlocks("s3://bucket", folder, most_bytes=places * 64) for places in (5, 3, 7)]
        for rank in ranks:
            resources.callback(rank.close)
        for number, block in enumerate(blocks):
            for rank in ranks:
                assert rank.block(manifest, number, partial(fetch, number)) == block
    assert fetched == dict.fromkeys(range(len(blocks)), 1)


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_with_any_number_of_places_a_block_is_the_requested_one(seed: int, places: int) -> None:
    chance = random.Random(seed)
    images = [chance.randbytes(chance.randrange(1, 8 * 64)) for _ in range(3)]
    manifests = [
        Manifest(
            rank=n,
            file=f"rank-{n}",
            nbytes=len(image),
            block_bytes=64,
            checksums=tuple(checksum(image[start : start + 64]) for start in range(0, len(image), 64)),
            entries=(),
        )
        for n, image in enumerate(images)
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        readers = [SharedBlocks("s3://bucket", Path(folder), most_bytes=places * 64) for _ in range(2)]
        for reader in readers:
            resources.callback(reader.close)
        for _ in range(40):
            image_index = chance.randrange(3)
            number = chance.randrange(len(manifests[image_index].checksums))
            expected = memoryview(images[image_index])[number * 64 : (number + 1) * 64]
            assert (
                chance.choice(readers).block(manifests[image_index], number, partial(memoryview, expected))
                == expected
            )

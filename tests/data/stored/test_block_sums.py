"""No token is handed out that was not compared with a checksum, wherever a byte of a dataset is damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data.making import gather, write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.reading.dataset import RunData
from phalanx.data.stored.index import HELD_OUT, INDEX_FILE, TRAIN
from phalanx.data.stored.shard_writer import BLOCK_BYTES, BlockSummer
from phalanx.data.stored.shards import MOST_WHOLE_BYTES, TokenShards, verify

BLOCK_TOKENS = BLOCK_BYTES // 2
STREAM = np.random.default_rng(0).integers(0, 257, 10 * BLOCK_TOKENS + 999)
SHARD_TOKENS = 4 * BLOCK_TOKENS + 500
"""Shards end within a block."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sums") / "set"
    write_dataset(directory, STREAM, held_out=STREAM[:3000], shard_tokens=SHARD_TOKENS)
    return directory


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "set"))


def without_sums(dataset: Path) -> Path:
    """The dataset as earlier releases prepared it."""
    for file in dataset.glob("*.sums"):
        file.unlink()
    return dataset


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 0x10]))


@given(pieces=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6))
@settings(max_examples=25)
def test_sums_do_not_depend_on_the_pieces_in_which_a_shard_was_written(pieces: list[int]) -> None:
    content = np.random.default_rng(1).bytes(sum(pieces))
    summer, start = BlockSummer(), 0
    for piece in pieces:
        summer.update(content[start : start + piece])
        start += piece
    checksum = xxhash.xxh3_128_hexdigest(content)
    written = np.frombuffer(summer.content(checksum)[32:], dtype="<u8").tolist()
    assert written == [
        xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES])
        for start in range(0, len(content), BLOCK_BYTES)
    ]


@given(place=st.integers(0, 2 * SHARD_TOKENS * 2 - 1), start=st.integers(0, len(STREAM)), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_flipped_byte_is_refused_exactly_where_its_block_is_read(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, place: int, start: int, data: st.DataObject
) -> None:
    dataset = Path(shutil.copytree(intact, tmp_path_factory.mktemp("flipped") / "set"))
    shard, byte = divmod(place, SHARD_TOKENS * 2)
    flip(dataset / f"train-0000{shard}.bin", byte)
    stop = data.draw(st.integers(start, min(start + 3 * BLOCK_TOKENS, len(STREAM))))
    # The tokens of the flipped byte's block, in the stream.
    first = shard * SHARD_TOKENS + byte // BLOCK_BYTES * BLOCK_TOKENS
    last = min(first + BLOCK_TOKENS, (shard + 1) * SHARD_TOKENS)
    opened = TokenShards.open(dataset, TRAIN)
    for _ in range(2):  # a block that was refused once is refused again
        if start < stop and start < last and first < stop:
            offset = byte // BLOCK_BYTES * BLOCK_BYTES
            says = rf"train-0000{shard}\.bin: bytes {offset} to \d+ are not what was written.*copy the file again"
            with pytest.raises(DatasetError, match=says):
                opened.read(start, stop)
            with pytest.raises(DatasetError, match=says):
                gather(opened, np.array([start]), stop - start)
        else:
            assert opened.read(start, stop).tolist() == STREAM[start:stop].tolist()
            assert gather(opened, np.array([start]), stop - start)[0].tolist() == STREAM[start:stop].tolist()


def test_what_is_read_once_is_not_compared_again(dataset: Path) -> None:
    opened = TokenShards.open(dataset, TRAIN)
    gather(opened, np.array([0, 100]), 50)
    flip(dataset / "train-00000.bin", 2000)  # seen through the map
    changed = opened.read(1000, 1001)
    assert changed[0] != STREAM[1000]
    with pytest.raises(DatasetError, match=f"bytes 0 to {BLOCK_BYTES}"):
        TokenShards.open(dataset, TRAIN).read(0, 1)


def test_held_out_tokens_are_checked_too(dataset: Path) -> None:
    flip(dataset / "held_out-00000.bin", 77)
    with pytest.raises(DatasetError, match=r"held_out-00000\.bin: bytes 0 to 6000"):
        TokenShards.open(dataset, HELD_OUT).read(0, 10)


def test_a_training_sample_with_a_flipped_byte_is_refused(dataset: Path) -> None:
    data = RunData.open(dataset, 100, seed=0)
    assert data.train_samples(0, 50).shape == (50, 101)
    for file in dataset.glob("train*.bin"):
        for block in range(file.stat().st_size // BLOCK_BYTES):
            flip(file, block * BLOCK_BYTES + 5)
    with pytest.raises(DatasetError, match="are not what was written, and nothing of them was trained on"):
        RunData.open(dataset, 100, seed=0).train_samples(0, 50)


def test_each_shard_of_a_dataset_without_sums_is_compared_as_a_whole(dataset: Path) -> None:
    flip(without_sums(dataset) / "train-00001.bin", 2 * SHARD_TOKENS - 1)
    opened = TokenShards.open(dataset, TRAIN)
    assert not opened.unchecked
    assert opened.read(0, 100).tolist() == STREAM[:100].tolist()
    with pytest.raises(DatasetError, match=r"train-00001\.bin is not what was written.*copy it again"):
        opened.read(SHARD_TOKENS, SHARD_TOKENS + 1)


def test_a_dataset_without_sums_that_is_too_large_to_be_compared_is_listed_as_unchecked(
    dataset: Path,
) -> None:
    # The last training shard becomes a sparse file: the dataset is larger than the limit, the disk holds no more.
    index = json.loads((dataset / INDEX_FILE).read_text())
    last = index["train"]["shards"][-1]
    last["tokens"] = MOST_WHOLE_BYTES // 2
    (dataset / INDEX_FILE).write_text(json.dumps(index))
    os.truncate(dataset / last["file"], MOST_WHOLE_BYTES)
    assert RunData.open(dataset, 100, seed=0).unchecked_folders == []
    assert RunData.open(without_sums(dataset), 100, seed=0).unchecked_folders == [dataset]


def test_sums_that_lack_are_written_for_intact_shards_and_are_those_of_preparation(
    intact: Path, dataset: Path
) -> None:
    written = {file.name: file.read_bytes() for file in intact.glob("*.sums")}
    assert len(written) == 4
    assert verify(dataset) == 0
    assert verify(without_sums(dataset)) == 4
    assert verify(dataset, write_missing_sums=True) == 0
    assert {file.name: file.read_bytes() for file in dataset.glob("*.sums")} == written


def test_sums_of_a_damaged_shard_are_never_written(dataset: Path) -> None:
    flip(without_sums(dataset) / "train-00000.bin", 3)
    with pytest.raises(DatasetError, match=r"train-00000\.bin; copy"):
        verify(dataset, write_missing_sums=True)
    assert not (dataset / "train-00000.sums").exists()


@pytest.mark.parametrize("place", [0, 9, 40])
def test_damaged_sums_are_named_and_not_their_shard(dataset: Path, place: int) -> None:
    flip(dataset / "train-00000.sums", place)
    says = r"train-00000\.sums (holds no block sums|is damaged).*--write-sums"
    with pytest.raises(DatasetError, match=says):
        TokenShards.open(dataset, TRAIN).read(BLOCK_TOKENS, BLOCK_TOKENS + 5)
    with pytest.raises(DatasetError, match=r"train-00000\.sums"):
        verify(dataset)


def test_sums_cut_short_are_named(dataset: Path) -> None:
    os.truncate(dataset / "train-00000.sums", 40)
    with pytest.raises(DatasetError, match=r"train-00000\.sums holds no block sums of train-00000\.bin"):
        TokenShards.open(dataset, TRAIN).read(0, 5)


def test_a_shard_that_came_with_its_sums_from_another_dataset_is_refused(
    dataset: Path, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "other", STREAM[::-1].copy(), shard_tokens=SHARD_TOKENS)
    for name in ("train-00000.bin", "train-00000.sums"):
        shutil.copyfile(tmp_path / "other" / name, dataset / name)
    with pytest.raises(
        DatasetError, match=r"train-00000\.sums holds no block sums of train-00000\.bin as the index has it"
    ):
        TokenShards.open(dataset, TRAIN).read(0, 5)

"""Token shards: one stream from many files, and every kind of damage is noticed and named."""

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.making import gather, write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.stored import shards
from phalanx.data.stored.index import HELD_OUT, TRAIN, parse_index, read_index
from phalanx.data.stored.shards import TokenShards, verify
from tiny_runs import make_dataset

STREAM = np.random.default_rng(0).integers(0, 257, 1034)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Eleven training shards, the last a short one, and two held-out ones."""
    write_dataset(tmp_path / "set", STREAM, held_out=STREAM[:150])
    return tmp_path / "set"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    directory = tmp_path_factory.mktemp("shards") / "set"
    write_dataset(directory, STREAM)
    return TokenShards.open(directory, TRAIN)


@given(data=st.data())
def test_reading_is_slicing_the_stream_wherever_shards_end(lasting: TokenShards, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(STREAM)))
    stop = data.draw(st.integers(start, len(STREAM)))
    assert lasting.read(start, stop).tolist() == STREAM[start:stop].tolist()


@given(length=st.integers(0, 250), data=st.data())
def test_gathering_is_reading_each(lasting: TokenShards, length: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, len(STREAM) - length), max_size=60))
    directory = lasting.directory
    gather_bytes = data.draw(st.sampled_from([1, 300, 1 << 20]))
    opened = TokenShards(directory, TRAIN, read_index(directory), gather_bytes=gather_bytes)
    gathered = gather(opened, np.array(starts, dtype=np.int64), length)
    assert gathered.shape == (len(starts), length)
    assert gathered.dtype == np.int64
    assert gathered.tolist() == [STREAM[start : start + length].tolist() for start in starts]


def test_gathering_nothing_gives_nothing(lasting: TokenShards) -> None:
    assert gather(lasting, np.array([0, len(STREAM)]), 0).shape == (2, 0)
    assert gather(lasting, np.array([], dtype=np.int64), 5).shape == (0, 5)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (1000, 1035)])
def test_reading_outside_the_stream_is_refused(lasting: TokenShards, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="not within the 1034"):
        lasting.read(start, stop)
    with pytest.raises(IndexError, match="not within the 1034"):
        gather(lasting, np.array([1030]), 5)


def test_the_first_batch_is_announced_to_the_system_and_those_after_one_that_waited_for_the_disk(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[int] = []
    faults = iter([0, 0, 0, 0, 0, 7, 7, 7])  # looked at before each batch and after it: the third waits
    monkeypatch.setattr(
        shards._MappedShard, "announce", lambda _self, offsets, _count: announced.extend(offsets.tolist())
    )
    opened = TokenShards(dataset, TRAIN, read_index(dataset), disk_reads=lambda: next(faults))
    for start in (1, 2, 3, 4):
        gather(opened, np.array([start]), 5)
    assert announced == [1, 4]


def test_more_shards_than_may_be_open_are_read_all_the_same(dataset: Path) -> None:
    opened = TokenShards(dataset, TRAIN, read_index(dataset), max_open_maps=2)
    before = len(os.listdir("/dev/fd"))
    for start in (0, 900, 450, 0, 100, 1000):
        assert opened.read(start, start + 30).tolist() == STREAM[start : start + 30].tolist()
        assert len(os.listdir("/dev/fd")) <= before + 2 * 2  # tokens and sums of each shard
    assert (
        gather(opened, np.arange(0, 1000, 50), 20).tolist() == STREAM[:1000].reshape(20, 50)[:, :20].tolist()
    )


@pytest.mark.parametrize(("vocab_size", "item_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_are_stored_in_as_few_bytes_as_the_vocabulary_needs(
    tmp_path: Path, vocab_size: int, item_bytes: int
) -> None:
    stream = np.array([0, 1, vocab_size - 1])
    write_dataset(tmp_path / "set", stream, vocab_size=vocab_size)
    assert (tmp_path / "set/train-00000.bin").stat().st_size == 3 * item_bytes
    assert TokenShards.open(tmp_path / "set", TRAIN).read(0, 3).tolist() == stream.tolist()


def test_a_shard_is_plain_little_endian_tokens(dataset: Path) -> None:
    assert np.fromfile(dataset / "train-00003.bin", dtype="<u2").tolist() == STREAM[300:400].tolist()


def test_an_empty_split_opens_with_no_tokens(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", STREAM)
    empty = TokenShards.open(tmp_path / "set", HELD_OUT)
    assert empty.tokens == 0
    assert empty.read(0, 0).tolist() == []


def test_the_fingerprint_does_not_depend_on_how_the_stream_is_cut(tmp_path: Path) -> None:
    cuts = [write_dataset(tmp_path / str(size), STREAM[:60], shard_tokens=size) for size in (1, 7, 25, 5000)]
    assert len({index.fingerprint for index in cuts}) == 1


@given(place=st.integers(0, len(STREAM) - 1))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_changed_token_changes_the_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, place: int
) -> None:
    changed = STREAM.copy()
    changed[place] = (changed[place] + 1) % 257
    before, after = (
        write_dataset(tmp_path_factory.mktemp("set") / "set", stream) for stream in (STREAM, changed)
    )
    assert before.fingerprint != after.fingerprint


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert write_dataset(tmp_path / "set", STREAM) == read_index(tmp_path / "set")


def test_an_intact_dataset_verifies_and_reports_its_progress(dataset: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(dataset, on_progress=lambda file, done, total: seen.append((file, done, total)))
    assert [done for _, done, _ in seen] == list(range(1, 14))
    assert {total for _, _, total in seen} == {13}


def test_flipped_bits_are_found_and_every_bad_shard_named(dataset: Path) -> None:
    for name in ("train-00004.bin", "held_out-00001.bin"):
        content = bytearray((dataset / name).read_bytes())
        content[17] ^= 0x04
        (dataset / name).write_bytes(content)
    with pytest.raises(DatasetError, match=r"train-00004\.bin, held_out-00001\.bin; copy these files again"):
        verify(dataset)


@pytest.mark.parametrize("change", [-1, +1, -200])
def test_a_shard_of_another_size_is_named_on_opening(dataset: Path, change: int) -> None:
    content = (dataset / "train-00002.bin").read_bytes()
    (dataset / "train-00002.bin").write_bytes((content + b"\0")[: len(content) + change])
    message = rf"train-00002\.bin has {200 + change} bytes instead of 200; copy it again"
    with pytest.raises(DatasetError, match=message):
        TokenShards.open(dataset, TRAIN)
    with pytest.raises(DatasetError, match=message):
        verify(dataset)


def test_a_shard_cut_short_after_opening_is_named_on_reading(dataset: Path) -> None:
    opened = TokenShards.open(dataset, TRAIN)
    (dataset / "train-00002.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"train-00002\.bin has 0 bytes"):
        opened.read(250, 260)


def test_a_missing_shard_is_named(dataset: Path) -> None:
    (dataset / "train-00002.bin").unlink()
    with pytest.raises(DatasetError, match=r"cannot open .*train-00002\.bin"):
        TokenShards.open(dataset, TRAIN)


def test_a_missing_directory_and_a_directory_without_index_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="there is no directory"):
        TokenShards.open(tmp_path / "nowhere", TRAIN)
    with pytest.raises(DatasetError, match=r"holds no index\.json; prepare the dataset there"):
        TokenShards.open(tmp_path, TRAIN)


def test_another_version_is_named_with_ours(dataset: Path) -> None:
    edit_index(dataset, version=4)
    with pytest.raises(
        DatasetError, match="version 4 of the dataset format, this Phalanx reads versions 1 to 3"
    ):
        TokenShards.open(dataset, TRAIN)


def test_a_version_that_its_content_contradicts_is_reported_as_damage(dataset: Path) -> None:
    edit_index(dataset, version=2)
    with pytest.raises(DatasetError, match="version 2 and packed_seq_len 0 contradict"):
        TokenShards.open(dataset, TRAIN)


def test_a_torn_index_is_reported_as_damaged(dataset: Path) -> None:
    text = (dataset / "index.json").read_text()
    for length in (0, 10, len(text) // 2):
        (dataset / "index.json").write_text(text[:length])
        with pytest.raises(DatasetError, match=r"index\.json is damaged"):
            TokenShards.open(dataset, TRAIN)


@pytest.mark.parametrize("change", [{"dtype": "uint8"}, {"train": None}, {"surprise": 1}, {"recipe": {}}])
def test_an_index_of_the_wrong_shape_is_reported_as_damaged(dataset: Path, change: dict[str, object]) -> None:
    edit_index(dataset, **change)
    with pytest.raises(DatasetError, match=r"index\.json is damaged"):
        TokenShards.open(dataset, TRAIN)


def test_an_index_edited_by_hand_is_refused(dataset: Path) -> None:
    edit_index(dataset, tokenizer_fingerprint="another")
    with pytest.raises(DatasetError, match=r"index\.json was changed"):
        TokenShards.open(dataset, TRAIN)


def test_an_unknown_split_is_refused_with_the_known_ones(dataset: Path) -> None:
    with pytest.raises(DatasetError, match="'test'; a dataset has train and held_out"):
        TokenShards.open(dataset, "test")


def edit_index(dataset: Path, **changes: object) -> None:
    content = json.loads((dataset / "index.json").read_text())
    (dataset / "index.json").write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "9"}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"file": None}, "file"),
        ({"file": "../train-00000.bin"}, "outside the dataset"),
        ({"file": "/etc/hosts"}, "outside the dataset"),
        ({"file": ".."}, "outside the dataset"),
        ({"file": "."}, "outside the dataset"),
        ({"file": ""}, "outside the dataset"),
        ({"file": "a\0b"}, "outside the dataset"),
        ({"md5": "0"}, "md5"),
    ],
)
def test_an_index_of_many_shards_is_read_at_once_and_what_is_wrong_with_one_of_them_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    index = read_index(make_dataset(tmp_path / "words"))
    (shard,) = index.train.shards
    many = (
        msgspec.structs.replace(shard, tokens=1),
        *(msgspec.structs.replace(shard, file=f"{n}.bin") for n in range(2000)),
    )
    large = replace(index, train=replace(index.train, shards=many))
    assert parse_index(large.to_json(), tmp_path) == large
    content = json.loads(large.to_json())
    content["train"]["shards"][1000] |= change
    with pytest.raises(DatasetError, match=message):
        parse_index(json.dumps(content), tmp_path)


def test_shards_of_more_tokens_than_can_be_counted_are_reported_as_damage(dataset: Path) -> None:
    content = json.loads((dataset / "index.json").read_text())
    for tokens in (10**30, 1 << 61):
        content["train"]["shards"][0]["tokens"] = tokens
        with pytest.raises(DatasetError, match=r"train\.shards: have more tokens than any disk holds"):
            parse_index(json.dumps(content), dataset / "index.json")


def test_where_the_system_does_not_count_a_threads_page_faults_reading_is_the_same(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = np.array([3, 0])
    expected = gather(TokenShards.open(dataset, TRAIN), starts, 4)
    monkeypatch.delattr("resource.RUSAGE_THREAD")
    assert np.array_equal(gather(TokenShards.open(dataset, TRAIN), starts, 4), expected)

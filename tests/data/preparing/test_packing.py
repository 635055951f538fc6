"""Packing: documents stay whole, every token but a document's first is a target exactly once, and little is padding."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.making import write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.preparing.split_writer import Packer, best_fit, pieces_of
from phalanx.data.reading.dataset import NO_TARGET, RunData
from phalanx.data.reading.sources import epoch_problems, mixture_of, read_data_index
from phalanx.data.stored.index import HELD_OUT, TRAIN, read_index
from phalanx.data.stored.shards import TokenShards
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec, TrainSpec

END = 256


@given(st.integers(1, 400), st.integers(2, 40))
def test_the_pieces_of_a_document_make_each_token_but_its_first_a_target_once(
    length: int, seq_len: int
) -> None:
    pieces = pieces_of(length, seq_len)
    assert all(1 <= len(piece) <= seq_len for piece in pieces)
    assert [target for piece in pieces for target in list(piece)[1:]] == list(range(1, length))
    assert len(pieces) == 1 or length > seq_len
    assert all(len(piece) == seq_len for piece in pieces[:-1])


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 60))
def test_bins_hold_every_item_once_and_no_more_than_they_can(lengths: list[int], room: int) -> None:
    bins = best_fit(lengths, room)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= room for items in bins)
    assert bins == best_fit(lengths, room)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 60))
def test_each_item_goes_into_the_fullest_bin_that_has_room(lengths: list[int], room: int) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):  # the plain rule, in quadratic time
        fitting = [left for left in rooms if left >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else room) - length)
    packed = [room - sum(lengths[item] for item in items) for items in best_fit(lengths, room)]
    assert sorted(packed) == sorted(rooms)


@given(st.lists(st.integers(1, 90), max_size=60), st.sets(st.integers(2, 60), max_size=3))
def test_classes_of_lengths_share_no_record_and_lose_no_token(lengths: list[int], chosen: set[int]) -> None:
    classes, room = sorted(chosen), 40
    packer = Packer(room, 0, classes)
    for number, length in enumerate(lengths, start=1):
        assert packer.add(np.full(length, number, dtype=np.uint32)) is None
    records = packer.flush()
    assert (records is None) == (not lengths)
    counts: Counter[int] = Counter()
    for record in [] if records is None else records.tolist():
        there = {number for number in record if number}
        kinds = {sum(lengths[number - 1] > least for least in classes) for number in there}
        assert len(kinds) == 1
        counts += Counter(record)
    assert counts.pop(0, 0) == packer.padding_tokens
    # Each piece after the first repeats a token.
    expected = {n: length + len(pieces_of(length, room)) - 1 for n, length in enumerate(lengths, start=1)}
    assert dict(counts) == expected


def test_lengths_like_those_of_the_web_leave_hardly_any_padding() -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(
        np.exp(generator.normal(6.1, 1.1, 12_000)).astype(int) + 2, 2048
    )  # median 450, mean 820
    bins = best_fit(lengths.tolist(), 2048)
    assert len(bins) <= -(-int(lengths.sum()) // 2048) * 1.002


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens encode document and place."""
    return [
        np.array([*(1000 * (number + 1) + place for place in range(length - 1)), END])
        for number, length in enumerate(lengths)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 90), max_size=60), st.integers(2, 30), st.integers(20, 400))
def test_every_token_but_a_documents_first_is_a_target_exactly_once(
    lengths: list[int], seq_len: int, window: int
) -> None:
    packer = Packer(seq_len, END, window_tokens=window)
    windows = [packer.add(document) for document in documents(lengths)]
    windows.append(packer.flush())
    records = np.concatenate(
        [
            np.empty((0, seq_len), np.uint32),
            *(window_records for window_records in windows if window_records is not None),
        ]
    )
    pairs: Counter[tuple[int, int]] = Counter()
    for record in records.tolist():
        for token, target in itertools.pairwise(record):
            if token != END:
                pairs[token, target] += 1
    expected = Counter(
        (int(token), int(target))
        for document in documents(lengths)
        for token, target in itertools.pairwise(document)
    )
    assert pairs == expected
    cut = sum(len(pieces_of(length, seq_len)) - 1 for length in lengths)
    assert records.size == sum(lengths) + cut + packer.padding_tokens


TEXTS = [Document(f"d{number}", "x" * (5 + number * 37 % 90)) for number in range(120)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "set"
    prepare(TEXTS, folder, tokenizer="bytes", held_out_fraction=0.1, packed_seq_len=64, shard_tokens=1000)
    return folder


def run_on(folder: Path, seq_len: int = 64) -> RunSpec:
    train = TrainSpec(batch_size=8, seq_len=seq_len, targets_within_documents=True)
    return RunSpec(data=DataSpec(path=str(folder)), train=train)


def test_a_packed_dataset_holds_full_documents_and_counts_its_padding(packed: Path) -> None:
    index = read_index(packed)
    assert (index.version, index.packed_seq_len) == (2, 64)
    assert index.train.documents + index.held_out.documents == 120
    for split in (TRAIN, HELD_OUT):
        records = TokenShards.open(packed, split).read(0, index.split(split).tokens).reshape(-1, 64)
        ends = (records[:, :-1] == END) & (records[:, 1:] == END)
        assert int(ends.sum()) == index.split(split).padding
        texts = "".join(map(chr, np.where(records == END, 10, records).reshape(-1).tolist())).split("\n")
        counts = Counter(len(text) for text in texts if text)
        short = {len(document.text) for document in TEXTS if len(document.text) < 64}
        assert all(set(text) == {"x"} for text in texts if text)
        assert short & set(counts)
    assert index.train.padding < 0.05 * index.train.tokens


def test_the_same_documents_are_packed_into_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    again = prepare(
        TEXTS, tmp_path / "again", tokenizer="bytes", held_out_fraction=0.1, packed_seq_len=64
    ).index
    assert again.fingerprint == read_index(packed).fingerprint
    assert prepare(
        TEXTS, packed, tokenizer="bytes", held_out_fraction=0.1, packed_seq_len=64, shard_tokens=1000
    ).reused
    stream = prepare(TEXTS, tmp_path / "stream", tokenizer="bytes", held_out_fraction=0.1).index
    assert stream.fingerprint != again.fingerprint
    assert stream.version == 1
    written = json.loads((tmp_path / "stream/index.json").read_text())
    assert "packed_seq_len" not in written["recipe"]
    assert "padding" not in written["train"]


def test_a_sample_is_a_record_whose_last_token_has_no_target(packed: Path) -> None:
    data, index = RunData.of_run(run_on(packed)), read_index(packed)
    records = TokenShards.open(packed, TRAIN).read(0, index.train.tokens).reshape(-1, 64)
    samples = data.train_samples(0, len(records))
    assert (samples[:, -1] == NO_TARGET).all()
    assert sorted(map(tuple, samples[:, :-1].tolist())) == sorted(map(tuple, records.tolist()))


def test_held_out_targets_and_their_bytes_are_those_within_documents(packed: Path) -> None:
    data, index = RunData.of_run(run_on(packed)), read_index(packed)
    numbers = np.arange(data.held_out_len)
    records = TokenShards.open(packed, HELD_OUT).read(0, index.held_out.tokens).reshape(-1, 64)
    counted = [
        (token, target) for record in records for token, target in itertools.pairwise(record) if token != END
    ]
    assert int(data.held_out_targets(numbers).sum()) == len(counted)
    assert int(data.held_out_bytes(numbers).sum()) == sum(target != END for _, target in counted)


def test_a_packed_dataset_is_refused_for_another_length_with_the_remedy(packed: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"packed for sequences of 64 tokens, and train\.seq_len is 32: set it to 64"
    ):
        RunData.of_run(run_on(packed, 32))


def test_packed_and_joined_sources_mix(packed: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "joined", np.arange(3000) % 256)
    sources = (
        SourceSpec("packed", str(packed), epochs=0),
        SourceSpec("joined", str(tmp_path / "joined"), epochs=0),
    )
    spec = RunSpec(data=DataSpec(sources=sources), train=TrainSpec(batch_size=8, seq_len=64, steps=2))
    samples = RunData.of_run(spec).train_samples(0, 40)
    assert int((samples[:, -1] == NO_TARGET).sum()) == 20
    index = read_data_index(spec.data)
    assert index.packed_seq_len == 64
    assert not list(epoch_problems(spec, mixture_of(spec, index)))  # type: ignore[arg-type]

"""Preparing: every document is whole in one split; existing datasets are used or left alone; failures leave nothing."""

import hashlib
import json
import lzma
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.preparing.other_processes import prepare_until_killed, prepare_with_small_files
from parity.llama3_folder import begins_texts, byte_level_bpe
from phalanx.data.errors import CorpusError, DatasetError, DatasetExistsError, TokenizerError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.files import files_of
from phalanx.data.preparing.prepare import PreparedDataset, prepare
from phalanx.data.preparing.split_writer import split_of
from phalanx.data.reading.dataset import RunData, verify_dataset
from phalanx.data.stored.index import HELD_OUT, TRAIN, read_index
from phalanx.data.stored.shards import TokenShards, verify
from phalanx.data.tokenizers.tokenizer import load_tokenizer, train_bpe
from ranks import FORKS

DOCUMENTS = [
    Document(f"poem-{i}", f"Roses number {i},\nviolets {i * i}; naïve <|endoftext|> 日本\n" * (i % 7 + 1))
    for i in range(120)
]
FRACTION = 0.2
HELD_OUT_TEXTS = [d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == HELD_OUT]


SETTINGS: dict[str, Any] = {"tokenizer": "bytes", "held_out_fraction": FRACTION, "shard_tokens": 1000}


def make(out: Path, tokenizer: str | Path = "bytes", **changes: object) -> PreparedDataset:
    return prepare(DOCUMENTS, out, **(SETTINGS | {"tokenizer": tokenizer, **changes}))


def texts_in(directory: Path, split: str) -> list[str]:
    tokenizer = load_tokenizer(directory)
    shards = TokenShards.open(directory, split)
    tokens = shards.read(0, shards.tokens).astype(np.int64)
    ends = np.flatnonzero(tokens == tokenizer.end_of_document)
    assert ends[-1] == len(tokens) - 1
    return [
        tokenizer.decode(part[part != tokenizer.end_of_document].tolist())
        for part in np.split(tokens, ends)[:-1]
    ]


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_whole_in_the_split_of_its_name(tmp_path: Path, tokenizer: str) -> None:
    make(tmp_path / "set", tokenizer, vocab_size=400 if tokenizer == "bpe" else None)
    for split in (TRAIN, HELD_OUT):
        expected = [d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == split]
        assert texts_in(tmp_path / "set", split) == expected


def test_counts_of_text_are_those_of_the_documents(tmp_path: Path) -> None:
    index = make(tmp_path / "set", "bpe", vocab_size=400).index
    assert (index.held_out.documents, index.train.documents + index.held_out.documents) == (
        len(HELD_OUT_TEXTS),
        120,
    )
    assert index.held_out.text_bytes == sum(len(text.encode()) for text in HELD_OUT_TEXTS)


def test_bytes_of_text_of_the_targets_are_those_of_the_split(tmp_path: Path) -> None:
    index = make(tmp_path / "set", "bpe", vocab_size=400).index
    data = RunData.open(tmp_path / "set", 1, seed=0)
    first_token = data.held_out_samples(0, 1)[0, :1]
    targets_bytes = data.held_out_bytes(np.arange(data.held_out_len)).sum()
    assert targets_bytes + data.tokenizer.byte_lengths[first_token].sum() == index.held_out.text_bytes


def test_what_was_prepared_verifies(tmp_path: Path) -> None:
    assert len(make(tmp_path / "set").index.train.shards) > 3
    verify(tmp_path / "set")


def test_the_same_documents_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make(tmp_path / name, "bpe", vocab_size=400)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_the_split_of_a_document_stays_when_others_are_added() -> None:
    names = [f"document {i}" for i in range(2000)]
    held_out = [name for name in names if split_of(name, 0.1) == HELD_OUT]
    assert 140 < len(held_out) < 260
    assert {split_of(name, 0.2) for name in held_out} == {HELD_OUT}


def test_copies_across_the_splits_are_counted_and_there_are_none_if_texts_decide(tmp_path: Path) -> None:
    copies = [Document(f"copy-of-{d.name}", d.text.replace("\n", " \n")) for d in DOCUMENTS]
    train = {d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == TRAIN}
    train |= {d.text for d, c in zip(DOCUMENTS, copies, strict=True) if split_of(c.name, FRACTION) == TRAIN}
    held_out = [d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == HELD_OUT]
    held_out += [
        d.text for d, c in zip(DOCUMENTS, copies, strict=True) if split_of(c.name, FRACTION) == HELD_OUT
    ]
    by_name = prepare([*DOCUMENTS, *copies], tmp_path / "name", **SETTINGS)
    assert by_name.held_out_in_training == sum(text in train for text in held_out) > 0
    assert read_index(tmp_path / "name").held_out_in_training == by_name.held_out_in_training
    by_text = prepare([*DOCUMENTS, *copies], tmp_path / "text", hold_out_by="text", **SETTINGS)
    assert by_text.held_out_in_training == 0
    assert by_text.index.held_out.documents > 0
    renamed = [Document(f"{number}", d.text) for number, d in enumerate([*DOCUMENTS, *copies])]
    prepare(renamed, tmp_path / "renamed", hold_out_by="text", **SETTINGS)
    assert texts_in(tmp_path / "renamed", HELD_OUT) == texts_in(tmp_path / "text", HELD_OUT)
    assert read_index(tmp_path / "text").recipe.hold_out_by == "text"
    assert "hold_out_by" not in (tmp_path / "name" / "index.json").read_text()


def test_files_without_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=rf"0 documents of {tmp_path / 'empty.txt'} to train on"):
        prepare(files_of([tmp_path]), tmp_path / "out", tokenizer="bytes")


def test_a_tokenizer_is_trained_on_the_training_split_alone(tmp_path: Path) -> None:
    make(tmp_path / "set", "bpe", vocab_size=400)
    texts = [d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == TRAIN]
    assert load_tokenizer(tmp_path / "set").fingerprint == train_bpe(texts, vocab_size=400).fingerprint


def test_a_given_tokenizer_goes_with_the_dataset(tmp_path: Path) -> None:
    tokenizer = train_bpe(["another text altogether"] * 9, vocab_size=270)
    (tmp_path / "given").mkdir()
    tokenizer.save(tmp_path / "given")
    info = make(tmp_path / "set", tmp_path / "given/tokenizer.json")
    assert (
        info.index.tokenizer_fingerprint
        == tokenizer.fingerprint
        == load_tokenizer(tmp_path / "set").fingerprint
    )


def test_xz_is_measured_on_the_held_out_text_as_one(tmp_path: Path) -> None:
    text = "".join(HELD_OUT_TEXTS).encode()
    expected = 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert make(tmp_path / "set").index.held_out_xz_bits_per_byte == pytest.approx(expected)


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the xz program")
def test_the_xz_program_agrees(tmp_path: Path) -> None:
    text = "".join(HELD_OUT_TEXTS).encode()
    compressed = subprocess.run(["xz", "-9", "-c"], input=text, capture_output=True, check=True).stdout
    # Xz measures in blocks of four bytes and may note sizes in its header that a stream leaves out.
    assert make(tmp_path / "set").index.held_out_xz_bits_per_byte == pytest.approx(
        8 * len(compressed) / len(text), rel=0.02
    )


def test_without_held_out_text_there_is_nothing_to_compress(tmp_path: Path) -> None:
    assert make(tmp_path / "set", held_out_fraction=0.0).index.held_out_xz_bits_per_byte is None
    assert RunData.open(tmp_path / "set", 10, seed=0).held_out_len == 0


def test_documents_without_text_leave_no_trace(tmp_path: Path) -> None:
    with_empty = [Document("empty", ""), *DOCUMENTS, Document("empty too", "")]
    with_empty_ones = prepare(with_empty, tmp_path / "one", tokenizer="bytes", held_out_fraction=FRACTION)
    without_them = prepare(DOCUMENTS, tmp_path / "other", tokenizer="bytes", held_out_fraction=FRACTION)
    assert with_empty_ones.index == without_them.index


def test_progress_counts_documents_in_each_stage(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    make(tmp_path / "set", "bpe", vocab_size=300, on_progress=lambda *event: seen.append(event))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["read", "train tokenizer", "encode"]
    assert seen[119] == ("read", 120, 0)
    assert seen[-1] == ("encode", 120, 120)


def test_files_are_prepared_like_documents(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for document in DOCUMENTS:
        (tmp_path / "text" / document.name).write_bytes(document.text.encode())
    corpus = files_of([tmp_path / "text"])
    from_files = prepare(corpus, tmp_path / "one", tokenizer="bytes", held_out_fraction=FRACTION)
    in_order = sorted(DOCUMENTS, key=lambda document: document.name)
    from_list = prepare(in_order, tmp_path / "two", tokenizer="bytes", held_out_fraction=FRACTION)
    assert from_files.index == from_list.index


def test_preparing_the_same_again_uses_what_is_there(tmp_path: Path) -> None:
    first = make(tmp_path / "set", "bpe", vocab_size=300)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    again = make(tmp_path / "set", "bpe", vocab_size=300)
    assert (first.reused, again.reused) == (False, True)
    assert again.index == first.index
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before


def test_an_empty_directory_may_be_prepared_into(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    assert not make(tmp_path / "set").reused


def test_another_dataset_is_left_alone_and_the_difference_named(tmp_path: Path) -> None:
    make(tmp_path / "set")
    before = contents(tmp_path / "set")
    with pytest.raises(DatasetExistsError, match=r"another dataset \(held_out_fraction 0\.2, not 0\.3\)"):
        make(tmp_path / "set", held_out_fraction=0.3)
    assert contents(tmp_path / "set") == before


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/thesis.tex").write_text("precious")
    with pytest.raises(DatasetExistsError, match="choose another directory"):
        make(tmp_path / "set")
    assert (tmp_path / "set/thesis.tex").read_text() == "precious"


def test_a_damaged_dataset_is_not_reused(tmp_path: Path) -> None:
    make(tmp_path / "set")
    (tmp_path / "set/train-00000.bin").write_bytes(b"short")
    with pytest.raises(DatasetExistsError, match=r"damaged .*train-00000\.bin has 5 bytes"):
        make(tmp_path / "set")


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    receiver, outcome = FORKS.Pipe(duplex=False)
    settings = SETTINGS | {"shard_tokens": 1 << 20}
    process = FORKS.Process(
        target=prepare_with_small_files, args=(DOCUMENTS, tmp_path / "set", settings, outcome)
    )
    process.start()
    outcome.close()
    process.join()
    assert re.match(
        "NoRoomError: .*: make room there, or choose a directory on another disk", receiver.recv()
    )
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_the_way_leaves_nothing_behind(tmp_path: Path) -> None:
    corpus = Changing(fails_on=2)
    with pytest.raises(CorpusError, match="gone"):
        prepare(corpus, tmp_path / "set", tokenizer="bytes", held_out_fraction=FRACTION)
    assert list(tmp_path.iterdir()) == []


class Changing:
    """A corpus that changes, or fails, when it is read for the n-th time."""

    def __init__(self, *, changes_on: int = 0, fails_on: int = 0) -> None:
        self.changes_on, self.fails_on, self.times = changes_on, fails_on, 0

    def __iter__(self) -> Iterator[Document]:
        self.times += 1
        yield from DOCUMENTS[: -1 if self.times == self.changes_on else None]
        if self.times == self.fails_on:
            raise CorpusError("gone")


def test_documents_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="changed while they were being prepared"):
        prepare(Changing(changes_on=2), tmp_path / "set", tokenizer="bytes", held_out_fraction=FRACTION)
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_another_process_prepared_meanwhile_is_used(tmp_path: Path) -> None:
    out = tmp_path / "set"

    def prepare_too(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("encode", total):
            make(out)

    assert make(out, on_progress=prepare_too).reused
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_generator_is_refused_before_it_is_used_up(tmp_path: Path) -> None:
    generator = (document for document in DOCUMENTS)
    with pytest.raises(CorpusError, match="not a generator"):
        prepare(generator, tmp_path / "set")
    assert next(generator) is DOCUMENTS[0]


def test_a_tokenizer_that_is_not_the_datasets_is_found_by_verifying(tmp_path: Path) -> None:
    make(tmp_path / "set", "bpe", vocab_size=300)
    verify_dataset(tmp_path / "set")
    train_bpe(["another text"] * 9, vocab_size=270).save(tmp_path / "set")
    with pytest.raises(DatasetError, match="is not the one that its tokens were made with"):
        verify_dataset(tmp_path / "set")


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_an_end_is_held_out_of_documents_too_few_for_their_names_to_decide(
    tmp_path: Path, count: int
) -> None:
    few = [document for document in DOCUMENTS if split_of(document.name, FRACTION) == TRAIN][:count]
    prepare(few, tmp_path / "set", tokenizer="bytes", held_out_fraction=FRACTION)
    train, held_out = texts_in(tmp_path / "set", TRAIN), texts_in(tmp_path / "set", HELD_OUT)
    largest = max(few, key=lambda document: len(document.text)).text
    (end,) = held_out
    (begin,) = set(train) - {document.text for document in few}
    assert begin + end == largest
    total = sum(len(document.text) for document in few)
    assert min(FRACTION * total, len(largest) / 2) <= len(end) + 1 <= 2 * FRACTION * total + 2


def test_documents_that_are_all_held_out_leave_the_begin_of_the_largest_to_train_on(tmp_path: Path) -> None:
    few = [document for document in DOCUMENTS if split_of(document.name, FRACTION) == HELD_OUT][:2]
    prepare(few, tmp_path / "set", tokenizer="bytes", held_out_fraction=FRACTION)
    joined = "".join(texts_in(tmp_path / "set", TRAIN) + texts_in(tmp_path / "set", HELD_OUT))
    assert sorted(joined) == sorted("".join(document.text for document in few))


def test_one_document_without_lines_or_spaces_is_cut_where_it_must(tmp_path: Path) -> None:
    prepare([Document("dna", "ACGT" * 100)], tmp_path / "set", tokenizer="bytes", held_out_fraction=0.05)
    assert [len(text) for text in texts_in(tmp_path / "set", HELD_OUT)] == [20]


@pytest.mark.parametrize("documents", [[], [Document("empty", "")], [Document("one letter", "a")]])
def test_documents_without_text_to_divide_are_refused(tmp_path: Path, documents: list[Document]) -> None:
    with pytest.raises(CorpusError, match="there is too little text"):
        prepare(documents, tmp_path / "set", tokenizer="bytes")


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = FORKS.Process(target=prepare_until_killed, args=(DOCUMENTS, tmp_path / "set", SETTINGS))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert ".partial-" in left.name
    make(tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_text_that_is_not_unicode_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="document 'torn' cannot be written as UTF-8"):
        prepare([*DOCUMENTS, Document("torn", "a\ud800")], tmp_path / "set", tokenizer="bytes")


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 7])
def test_a_fraction_outside_zero_to_one_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(DatasetError, match="held_out_fraction"):
        make(tmp_path / "set", held_out_fraction=fraction)


def test_a_vocabulary_size_that_is_not_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="vocab_size = 5000, but the tokenizer given has 257"):
        make(tmp_path / "set", vocab_size=5000)


def test_a_mistyped_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"cannot read .*bep"):
        make(tmp_path / "set", "bep")


def test_documents_begin_with_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    begins_texts(byte_level_bpe()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    info = make(tmp_path / "set", tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "set")
    assert info.index.recipe.document_start == tokenizer.document_start != ()
    for split in (TRAIN, HELD_OUT):
        shards = TokenShards.open(tmp_path / "set", split)
        documents = [d.text for d in DOCUMENTS if split_of(d.name, FRACTION) == split]
        expected = [
            token
            for text in documents
            for token in (*tokenizer.document_start, *tokenizer.encode(text), tokenizer.end_of_document)
        ]
        assert shards.read(0, shards.tokens).tolist() == expected
        assert texts_in(tmp_path / "set", split) == documents


def test_a_dataset_of_a_version_that_began_no_document_is_read_but_not_taken_for_one_that_does(
    tmp_path: Path,
) -> None:
    begins_texts(byte_level_bpe()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    make(tmp_path / "set", tmp_path / "tokenizer.json")
    index = tmp_path / "set" / "index.json"
    content = json.loads(index.read_text())
    del content["recipe"]["document_start"]
    index.write_text(json.dumps(content))
    assert read_index(tmp_path / "set").recipe.document_start == ()
    verify_dataset(tmp_path / "set")
    with pytest.raises(DatasetExistsError, match=r"document_start \(\), not \(290,\)"):
        make(tmp_path / "set", tmp_path / "tokenizer.json")

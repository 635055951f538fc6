"""Samples: sequences of the stream, each once an epoch, for every reader."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.making import write_dataset
from phalanx.data.errors import DatasetError
from phalanx.data.order.permutation import SampleOrder
from phalanx.data.reading.dataset import RunData, TokenSequences
from phalanx.data.reading.sources import open_place
from phalanx.data.stored.index import TRAIN

# Each token is its place, so that a sample shows where it was cut from.
PLACES = np.arange(1000)
SEQ_LEN = 7
SAMPLES = 142


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dataset") / "set"
    write_dataset(directory, PLACES, held_out=np.array([256, 66, 256, 67, 256, 68, 69, 70]), vocab_size=1000)
    return directory


@pytest.fixture(scope="module")
def run_data(directory: Path) -> RunData:
    return RunData.open(directory, SEQ_LEN, seed=3)


def test_sample_j_is_its_inputs_and_the_one_token_after(directory: Path) -> None:
    dataset = TokenSequences(open_place(str(directory)), TRAIN, SEQ_LEN)
    assert len(dataset) == SAMPLES
    for j, sample in enumerate(dataset.samples(np.arange(SAMPLES))):
        assert sample.tolist() == PLACES[j * SEQ_LEN : (j + 1) * SEQ_LEN + 1].tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (7, 0), (8, 1), (14, 1), (15, 2)])
def test_only_whole_samples_with_a_last_target_count(tmp_path: Path, tokens: int, samples: int) -> None:
    write_dataset(tmp_path / "set", PLACES[:tokens], vocab_size=1000)
    assert len(TokenSequences(open_place(str(tmp_path / "set")), TRAIN, SEQ_LEN)) == samples


def test_a_sample_outside_the_dataset_is_refused(directory: Path) -> None:
    dataset = TokenSequences(open_place(str(directory)), TRAIN, SEQ_LEN)
    for index in (-1, SAMPLES):
        with pytest.raises(IndexError, match=r"not all in \[0, 142\)"):
            dataset.samples(np.array([index]))


def test_every_sample_comes_exactly_once_an_epoch(run_data: RunData) -> None:
    for epoch in (0, 1, 5):
        firsts = run_data.train_samples(epoch * SAMPLES, SAMPLES)[:, 0]
        assert sorted(firsts.tolist()) == list(range(0, SAMPLES * SEQ_LEN, SEQ_LEN))


def test_samples_come_in_the_order_of_the_seed(run_data: RunData) -> None:
    order = SampleOrder(SAMPLES, seed=3).dataset_indices(100, 90)
    assert (run_data.train_samples(100, 90)[:, 0] // SEQ_LEN).tolist() == order.tolist()


@given(first=st.integers(0, 500), per_rank=st.integers(1, 20), ranks=st.integers(1, 8))
def test_ranks_together_read_what_one_rank_alone_reads(
    run_data: RunData, first: int, per_rank: int, ranks: int
) -> None:
    parts = [run_data.train_samples(first + rank * per_rank, per_rank) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), run_data.train_samples(first, ranks * per_rank))


def test_held_out_samples_come_in_file_order(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", PLACES, held_out=PLACES[::-1], vocab_size=1000)
    data = RunData.open(tmp_path / "set", SEQ_LEN, seed=0)
    assert data.held_out_len == SAMPLES
    assert data.held_out_samples(2, 3)[:, 0].tolist() == [985, 978, 971]


def test_bytes_of_held_out_text_are_those_of_the_targets(run_data: RunData) -> None:
    # Targets are B, end of document, C, end of document, D, E, F: five bytes of text.
    assert run_data.held_out_bytes(np.array([0])).tolist() == [5]


def test_bytes_of_text_are_counted_for_any_number_of_samples(tmp_path: Path) -> None:
    held_out = np.where(np.arange(2000) % 3 == 0, 256, 65)
    write_dataset(tmp_path / "set", PLACES, held_out=held_out, vocab_size=1000)
    data = RunData.open(tmp_path / "set", 2, seed=0)
    indices = np.arange(data.held_out_len)[::-1]
    expected = [int((held_out[2 * j + 1 : 2 * j + 3] != 256).sum()) for j in indices]
    assert data.held_out_bytes(indices).tolist() == expected
    assert len(expected) == 999


def test_fingerprint_and_tokenizer_are_the_datasets(run_data: RunData) -> None:
    assert run_data.fingerprint == run_data.index.fingerprint
    assert run_data.tokenizer.decode(run_data.held_out_samples(0, 1)[0].tolist()) == "BCDEF"


def test_a_dataset_shorter_than_a_sample_is_refused_with_both_lengths(directory: Path) -> None:
    with pytest.raises(
        DatasetError, match="1000 training tokens, and one sample of seq_len = 1000 needs 1001"
    ):
        RunData.open(directory, 1000, seed=0)
    assert RunData.open(directory, 999, seed=0).train_samples(0, 1).shape == (1, 1000)


def test_another_tokenizer_than_the_one_of_the_tokens_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", PLACES, vocab_size=1000)
    config = tmp_path / "set/tokenizer_config.json"
    config.write_text(config.read_text().replace('"bytes"', '"bpe"'))
    with pytest.raises(DatasetError, match="is not the one that its tokens were made with"):
        RunData.open(tmp_path / "set", SEQ_LEN, seed=0)


def test_reading_data_does_not_load_torch() -> None:
    modules = [
        "preparing.files",
        "reading.dataset",
        "reading.prefetch",
        "preparing.prepare",
        "stored.shards",
        "tokenizers.tokenizer",
    ]
    imports = ", ".join(f"phalanx.data.{name}" for name in modules)
    program = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)

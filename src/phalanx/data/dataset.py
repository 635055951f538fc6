"""Samples for a run: the prepared token stream, cut into sequences and asked for by number.

Sample j of a split is tokens j*S to j*S + S inclusive for a sequence length S: S inputs and, one further, S targets,
documents joined end to end ("packing", as in GPT-3 and after). ``RunData`` hands out training samples in the run's
shuffled order and held-out samples in file order. Nothing here knows how many ranks there are: a rank asks for the
sample numbers that it needs.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.index import HELD_OUT, TRAIN, DatasetIndex, read_index
from phalanx.data.order import SampleOrder
from phalanx.data.shards import TokenShards, verify
from phalanx.data.tokenizer import Tokenizer, load_tokenizer

# A whole held-out split may be counted in one call, and as int64 it can be larger than memory.
_COUNTED_AT_ONCE = 256


class PackedDataset:
    """A token stream cut into samples of ``seq_len`` inputs and their targets; the incomplete sample at the end is not used."""

    def __init__(self, shards: TokenShards, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len = {seq_len} is not positive")
        self.shards = shards
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (self.shards.tokens - 1) // self.seq_len)

    def samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of these numbers (1-D); shape (len(indices), seq_len + 1), int64.

        Inputs are ``[:, :-1]``, targets ``[:, 1:]``. Raises ``IndexError`` for a number not in [0, len(self)).
        """
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()}..{indices.max()} are not all in [0, {len(self)})")
        return self.shards.gather(indices * self.seq_len, self.seq_len + 1)


class RunData:
    """The data loader of one run: the prepared dataset in ``directory``, in the order of ``seed``."""

    index: DatasetIndex
    tokenizer: Tokenizer

    def __init__(self, directory: Path, seq_len: int, seed: int) -> None:
        """Raises ``DatasetError`` if the dataset is missing, damaged, or shorter than one sample."""
        self.index = read_index(directory)
        self.tokenizer = tokenizer_of(directory, self.index)
        self._train = PackedDataset(TokenShards.open(directory, TRAIN), seq_len)
        self._held_out = PackedDataset(TokenShards.open(directory, HELD_OUT), seq_len)
        if len(self._train) == 0:
            raise DatasetError(
                f"{directory} has {self._train.shards.tokens} training tokens, and one sample of seq_len = {seq_len} "
                f"needs {seq_len + 1}; shorten seq_len or prepare more text"
            )
        self._order = SampleOrder(n=len(self._train), seed=seed)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all tokens and the tokenizer."""
        return self.index.fingerprint

    @property
    def seq_len(self) -> int:
        return self._train.seq_len

    @property
    def held_out_len(self) -> int:
        return len(self._held_out)

    def train_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """The run's samples ``first`` to ``first + count``, across epochs; shape (count, seq_len + 1), int64."""
        return self._train.samples(self._order.dataset_indices(first, count))

    def held_out_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Held-out samples ``first`` to ``first + count`` in file order; shape (count, seq_len + 1), int64.

        Raises ``IndexError`` past ``held_out_len``.
        """
        return self._held_out.samples(np.arange(first, first + count, dtype=np.int64))

    def held_out_bytes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of text that the targets of each of these held-out samples stand for; shape (len(indices),), int64."""
        lengths = np.empty(len(indices), dtype=np.int64)
        byte_lengths = self.tokenizer.byte_lengths
        for start in range(0, len(indices), _COUNTED_AT_ONCE):
            block = slice(start, start + _COUNTED_AT_ONCE)
            lengths[block] = byte_lengths[self._held_out.samples(indices[block])[:, 1:]].sum(axis=1)
        return lengths


def tokenizer_of(directory: Path, index: DatasetIndex) -> Tokenizer:
    """The tokenizer in ``directory``. Raises ``DataError`` if it is not the one that the tokens were made with."""
    tokenizer = load_tokenizer(directory)
    if tokenizer.fingerprint != index.tokenizer_fingerprint:
        raise DatasetError(
            f"the tokenizer in {directory} is not the one that its tokens were made with; copy the dataset again, "
            "or prepare it anew"
        )
    return tokenizer


def verify_dataset(directory: Path) -> None:
    """Read the tokenizer and every shard, and compare them with the index. Raises ``DataError`` that names what differs."""
    tokenizer_of(directory, read_index(directory))
    verify(directory)

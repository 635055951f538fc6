"""Shows a record of a dataset as text, and which of it is learned: what there is to look at before a run is paid for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import DatasetError
from phalanx.data.reading.dataset import TokenSequences, inputs_of, tokenizer_of
from phalanx.data.reading.places import DatasetPlace
from phalanx.data.tokenizers.published.byte_fallback import FallbackTokenizer
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """A stretch of a record."""

    text: str
    learned: bool
    """True if there is a loss on its tokens; those that begin a document have none all the same."""


@dataclass(frozen=True)
class ShownRecord:
    """A record as text."""

    pieces: tuple[Piece, ...]
    tokens: int
    """Without those that fill it up."""
    padding: int


def show_record(place: DatasetPlace, split: str, number: int, seq_len: int) -> ShownRecord:
    """Record ``number`` of ``seq_len`` tokens of a split, from 0, special tokens spelled out. Raises ``DatasetError`` if there is none."""
    sequences = TokenSequences(place, split, seq_len)
    if not 0 <= number < len(sequences):
        raise DatasetError(
            f"there is no record {number:,}: the split has {len(sequences):,} of {seq_len:,} tokens, counted from 0"
        )
    tokenizer, sample = tokenizer_of(place), sequences.samples(np.array([number]))
    ids, learned = inputs_of(sample)[0], sample[0, :-1] >= 0
    end = place.index.document_end
    used = len(ids)
    if sequences.packed:
        filling = tokenizer.end_of_document if end is None else end
        others = np.flatnonzero(ids != filling)
        used = min(int(others[-1]) + 2 if len(others) else 0, used)  # the last document's end is its own
    ids, learned = ids[:used], learned[:used]
    runs = np.split(np.arange(used), np.flatnonzero(np.diff(learned)) + 1) if used else []
    pieces = (Piece(_spelled(tokenizer, ids[run].tolist()), bool(learned[run[0]])) for run in runs)
    return ShownRecord(tuple(pieces), used, seq_len - used)


def _spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    if isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
        return str(HfTokenizer.from_str(tokenizer.serialized).decode(ids, skip_special_tokens=False))
    return tokenizer.decode(ids)

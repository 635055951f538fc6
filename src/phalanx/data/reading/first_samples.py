"""Facts of the first samples that a run reads, recorded where it begins.

Text that repeats itself, a loss on the wrong tokens, and markup or another encoding in place of text show in no loss.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DataError
from phalanx.data.reading.dataset import RunData, inputs_of
from phalanx.data.stored.index import TRAIN
from phalanx.data.tokenizers.tokenizer import Tokenizer

_LOOKED_AT = 1 << 18
"""Tokens: some hundredths of a second."""
_WINDOW_DOUBLINGS = 5
"""Windows of 32 tokens: sentences, which two documents seldom share."""
_DECODED = 64
"""Samples whose text is looked at."""
_SPANS = 256
_BEFORE_SPAN = 6
"""Tokens before a learned span, which have the name of its role."""
_DOUBLY_ENCODED = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac")
"""Two-byte characters of UTF-8, and quotation marks, that were read as Latin-1 or Windows-1252."""


def facts_of_samples(data: RunData) -> dict[str, float | int | str]:
    """Return figures of the first samples of a run, as far as they are there; none of data in an object store, which may be slow, and
    none if a part of them cannot be read.

    ``repeated`` is the share of windows of learned tokens that an earlier sample has too, and ``held_out_repeated`` that of held-out windows that
    these samples have. ``ends_learned`` and ``next_special`` are shares of the
    learned spans that end with a special token, and that one follows. ``role`` is the word before most of the spans. ``json_lines`` is a share of
    lines, ``doubly_encoded`` one of the characters beyond ASCII.
    """
    samples = data.index.samples(TRAIN, data.seq_len)
    if data.cached or not samples:
        return {}
    try:
        read = data.train_samples(0, min(samples, max(1, _LOOKED_AT // data.seq_len)))
        held_out, _ = _windows(data.held_out_samples(0, min(_DECODED, data.held_out_len)))
    except (DataError, OSError):  # the step that needs the damaged part raises it, on every rank after a save
        return {}
    tokens, learned = inputs_of(read), read[:, :-1] >= 0
    facts: dict[str, float | int | str] = {"samples": len(tokens), "learned": float(learned.mean())}
    windows, rows = _windows(read)
    if windows.size:
        _, first, same = np.unique(windows, return_index=True, return_inverse=True)
        facts["repeated"] = float((rows[first][same] < rows).mean())
    if held_out.size:
        facts["held_out_repeated"] = float(np.isin(held_out, windows).mean())
    if not learned.all():
        facts |= _facts_of_spans(data.tokenizer, tokens, learned)
    texts = [data.tokenizer.decode(row.tolist()) for row in tokens[:_DECODED]]
    lines = sum(text.count("\n") for text in texts)
    beyond_ascii = sum(not character.isascii() for text in texts for character in text)
    if lines >= _DECODED:
        facts["json_lines"] = sum(text.count('\n{"') for text in texts) / lines
    if beyond_ascii >= _DECODED:
        facts["doubly_encoded"] = 2 * sum(len(_DOUBLY_ENCODED.findall(text)) for text in texts) / beyond_ascii
    return facts


def _windows(samples: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a hash of each window of learned tokens in ``samples``, and its row; none if samples are shorter than a window."""
    hashes, valid, length = inputs_of(samples).astype(np.uint64), samples[:, :-1] >= 0, 1
    for _ in range(_WINDOW_DOUBLINGS):
        # Doubles the length: odd factors make the order of the halves count.
        hashes = hashes[:, :-length] * np.uint64(0x9E3779B97F4A7C15 + 2 * length) + hashes[:, length:]
        valid = valid[:, :-length] & valid[:, length:]
        length *= 2
    rows = np.broadcast_to(np.arange(len(hashes))[:, None], hashes.shape)
    return hashes[valid], rows[valid]


def _facts_of_spans(
    tokenizer: Tokenizer, tokens: NDArray[np.int64], learned: NDArray[np.bool_]
) -> dict[str, float | str]:
    """Return how the learned spans begin and end; empty if none ends within a row."""
    ends, starts = learned[:, :-1] & ~learned[:, 1:], ~learned[:, :-1] & learned[:, 1:]
    special = tokenizer.byte_lengths[tokens] == 0
    if not ends.any():
        return {}
    facts: dict[str, float | str] = {
        "ends_learned": float(special[:, :-1][ends].mean()),
        "next_special": float(special[:, 1:][ends].mean()),
    }
    words = Counter[str]()
    for row, column in np.argwhere(starts)[:_SPANS].tolist():
        before = tokenizer.decode(tokens[row, max(0, column + 1 - _BEFORE_SPAN) : column + 1].tolist())
        words.update(re.findall(r"[A-Za-z]+", before.lower())[-1:])
    if words:
        facts["role"], count = words.most_common(1)[0]
        facts["role_share"] = count / words.total()
    return facts

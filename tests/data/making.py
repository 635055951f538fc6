"""Small datasets to test with, written by the real writer."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.stored.index import HELD_OUT, TRAIN, DatasetIndex, Recipe, Split, dtype_for
from phalanx.data.stored.shard_writer import ShardFolder, ShardWriter, commit
from phalanx.data.stored.shards import TokenShards
from phalanx.data.tokenizers.tokenizer import BytesTokenizer


def gather(shards: TokenShards, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """``length`` tokens from each of ``starts``, in rows."""
    out = np.empty((len(starts), length), dtype=np.int64)
    shards.gather(starts, length, out, np.arange(len(starts)))
    return out


def write_dataset(
    directory: Path,
    train: NDArray[np.int64],
    *,
    held_out: NDArray[np.int64] | None = None,
    shard_tokens: int = 100,
    vocab_size: int = 257,
) -> DatasetIndex:
    """Commit a dataset of these token streams, as if made by the bytes tokenizer."""
    partial = directory.with_name(directory.name + ".partial")
    partial.mkdir(parents=True)
    BytesTokenizer().save(partial)
    dtype = dtype_for(vocab_size)
    splits = {}
    for name, tokens in ((TRAIN, train), (HELD_OUT, np.empty(0, np.int64) if held_out is None else held_out)):
        with ShardWriter(ShardFolder(partial, name), dtype=dtype, shard_tokens=shard_tokens) as writer:
            for piece in np.array_split(tokens, 3):
                writer.append(piece)
            written = writer.close()
        splits[name] = Split(written.shards, documents=1, text_bytes=len(tokens), sha256=written.sha256)
    index = DatasetIndex(
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer_kind="bytes",
        tokenizer_fingerprint=BytesTokenizer().fingerprint,
        train=splits[TRAIN],
        held_out=splits[HELD_OUT],
        held_out_xz_bits_per_byte=None,
        recipe=Recipe("made for a test", "bytes", None, 0.0, shard_tokens),
    )
    commit(partial, directory, index)
    return index

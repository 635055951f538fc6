"""How fast shuffled training samples are, against a plain sequential read of the same memory map.

The floor for any loader is to take slices of the memory map one after the other and copy each to int64. Training
samples pay on top for the shuffle, for finding the shard, and for random access to memory. Both read the
same number of tokens in the same shapes, in turns; the ratio is the median over the turns, of the time on the clock and of the processor's, which other
work on the machine does not stretch. With ``--cold`` the file is
dropped from the page cache before each turn, so that the disk is read: there, plain page faults in the same random
order are a third contender, because sequential reads are no measure of a shuffle.

Training samples are compared with the checksums of their blocks when these are first touched. That is done once a process, so that
the reader kept over all turns has mostly done with it; "opened anew" begins each turn with no block compared, which is the cost of a
first epoch at its worst. A mixture draws from three parts of the same dataset.

    python -m bench.data.read [--json] [--tokens N] [--batch SAMPLES] [--turns N] [--cold]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.running import record, run_bench
from phalanx.data.reading.dataset import RunData
from phalanx.data.stored.index import HELD_OUT, TRAIN, DatasetIndex, Recipe, Split
from phalanx.data.stored.shard_writer import ShardFolder, ShardWriter, commit
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec, TrainSpec

SEQ_LEN = 2048
SHARD = "train-00000.bin"


Read = Callable[[int, int], object]
"""Reads ``count`` samples from sample ``first`` on."""


@dataclass(frozen=True)
class Reader:
    name: str
    open: Callable[[Path], Read]
    is_reopened: bool = False
    """True if it is opened for each turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of shuffled training samples")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--tokens", type=int, default=1 << 28, help="size of the dataset (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=256, help="samples per read (default %(default)s)")
    parser.add_argument("--turns", type=int, default=15, help="paired repetitions (default %(default)s)")
    parser.add_argument("--samples", type=int, default=16_384, help="samples per turn (default %(default)s)")
    parser.add_argument(
        "--cold", action="store_true", help="drop the file from the page cache before each turn"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        directory = Path(folder) / "dataset"
        write_dataset(directory, args.tokens)
        costs = time_turns(directory, args)
    report(costs, args)


def write_dataset(directory: Path, tokens: int) -> None:
    """Write a dataset of random bytes; the values do not matter to a reader."""
    partial = directory.with_name("partial")
    partial.mkdir()
    tokenizer = BytesTokenizer()
    tokenizer.save(partial)
    generator = np.random.default_rng(0)
    splits = {}
    for name, size in ((TRAIN, tokens), (HELD_OUT, 0)):
        with ShardWriter(ShardFolder(partial, name), dtype="uint16", shard_tokens=tokens) as writer:
            for start in range(0, size, 1 << 24):
                writer.append(generator.integers(0, 257, min(1 << 24, size - start), dtype=np.uint16))
            written = writer.close()
        splits[name] = Split(written.shards, documents=1, text_bytes=size, sha256=written.sha256)
    index = DatasetIndex(
        dtype="uint16",
        vocab_size=tokenizer.vocab_size,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        train=splits[TRAIN],
        held_out=splits[HELD_OUT],
        held_out_xz_bits_per_byte=None,
        recipe=Recipe("", "bytes", None, 0.0, tokens),
    )
    commit(partial, directory, index)


def open_sequential(directory: Path) -> Read:
    tokens = map_tokens(directory)
    return lambda first, count: copy_samples(tokens, np.arange(first, first + count))


def open_random(directory: Path) -> Read:
    tokens = map_tokens(directory)
    shuffled = np.random.default_rng(0).permutation((len(tokens) - 1) // SEQ_LEN)
    return lambda first, count: copy_samples(tokens, shuffled[first : first + count])


def open_run_data(directory: Path) -> Read:
    return RunData.open(directory, SEQ_LEN, seed=0).train_samples


def open_mixture(directory: Path) -> Read:
    parts = (("a", 0.0, 0.6), ("b", 0.6, 0.9), ("c", 0.9, 1.0))
    sources = tuple(
        SourceSpec(name, str(directory), (stop - start,), (start, stop)) for name, start, stop in parts
    )
    train = TrainSpec(batch_size=1024, seq_len=SEQ_LEN)
    return RunData.of_run(RunSpec(data=DataSpec(sources=sources), train=train)).train_samples


READERS = (
    Reader("memory map, sequential slices", open_sequential),
    Reader("memory map, random slices", open_random),
    Reader("RunData.train_samples", open_run_data),
    Reader("RunData, opened anew", open_run_data, is_reopened=True),
    Reader("RunData of three sources", open_mixture),
)


def map_tokens(directory: Path) -> NDArray[np.uint16]:
    return np.memmap(directory / SHARD, dtype="<u2", mode="r")


def copy_samples(tokens: NDArray[np.uint16], samples: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.empty((len(samples), SEQ_LEN + 1), dtype=np.int64)
    for row, sample in enumerate(samples.tolist()):
        out[row] = tokens[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1]
    return out


@dataclass(frozen=True)
class Cost:
    """Seconds of one turn of one reader, on the clock and of the processor."""

    wall_s: float
    cpu_s: float


def time_turns(directory: Path, args: argparse.Namespace) -> list[list[Cost]]:
    """Return the cost of each turn of each reader; in a turn all read the same sample numbers, in rotating order of readers."""
    costs: list[list[Cost]] = [[] for _ in READERS]
    kept = [] if args.cold else [reader.open(directory) for reader in READERS]
    available = args.tokens // SEQ_LEN - 1
    for turn in range(args.turns):
        first = turn * args.samples % max(1, available - args.samples)
        for place in range(len(READERS)):
            number = (place + turn) % len(READERS)
            if args.cold:
                # Pages that a map still holds stay in the cache, hence no map may outlive its turn.
                drop_from_cache(directory / SHARD)
            is_reopened = args.cold or READERS[number].is_reopened
            read = READERS[number].open(directory) if is_reopened else kept[number]
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for batch in range(first, first + args.samples, args.batch):
                read(batch, args.batch)
            costs[number].append(Cost(time.perf_counter() - start_s, time.process_time() - start_cpu_s))
            del read
        record(
            {
                "turn": turn,
                **{reader.name: turns[turn].wall_s for reader, turns in zip(READERS, costs, strict=True)},
            },
            is_printed=False,
        )
    return costs


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(costs: list[list[Cost]], args: argparse.Namespace) -> None:
    rows = []
    for reader, own in zip(READERS, costs, strict=True):
        turns = list(zip(costs[0], own, strict=True))
        rows.append(
            {
                "reader": reader.name,
                "tokens_per_s": args.samples * SEQ_LEN / statistics.median(cost.wall_s for cost in own),
                "ratio_to_sequential": statistics.median(floor.wall_s / cost.wall_s for floor, cost in turns),
                "ratio_of_processor_time": statistics.median(
                    floor.cpu_s / cost.cpu_s for floor, cost in turns
                ),
            }
        )
    if args.json:
        print(
            json.dumps(
                {"seq_len": SEQ_LEN, "batch": args.batch, "cold": args.cold, "readers": rows}, indent=1
            )
        )
        return
    print(
        f"{args.turns} turns of {args.samples} samples of {SEQ_LEN} tokens, {'cold' if args.cold else 'warm'} cache"
    )
    for row in rows:
        print(
            f"{row['reader']:32} {row['tokens_per_s'] / 1e6:9.1f} M tokens/s {row['ratio_to_sequential']:6.2f}x"
            f" {row['ratio_of_processor_time']:6.2f}x of processor time"
        )


if __name__ == "__main__":
    run_bench(main)

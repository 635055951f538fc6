"""Reading shuffled samples beside other loaders, on the same tokens in one run: Grain, OLMo-core and Megatron-Core's indexed dataset.

One dataset of packed records is written in each project's own form (a flat file of uint16; Megatron's ``.bin`` and ``.idx``), and each reads the same number of
records in a random order into int64, in turns: a turn of ours, then one of each peer, and of the floor beside each, which is slices of a memory map
one after the other, copied to int64. Peers run in Pythons of their own, each with its project installed; one without a Python is left out, with a line on stderr.
The report has the rate over that of the floor in the same turn, the median over the turns.

    python -m bench.data.beside_peers [--grain PYTHON] [--olmo PYTHON] [--megatron PYTHON] [--tokens N] [--turns N] [--json]

Also packing: the padding of best-fit records over the least that any packing could leave, on lengths like those of web text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SEQ_LEN = 2048
END = 256
PEERS = ("grain", "olmo", "olmo-with-lengths", "megatron")

Read = Callable[[NDArray[np.int64]], object]
"""Reads the records of these numbers, as int64."""


def flat(folder: Path) -> NDArray[np.uint16]:
    return np.memmap(folder / "train-00000.bin", dtype="<u2", mode="r")


def floor(folder: Path) -> Read:
    tokens = flat(folder)

    def read(numbers: NDArray[np.int64]) -> object:
        out = np.empty((len(numbers), SEQ_LEN), dtype=np.int64)
        for row in range(len(numbers)):  # one after the other; the numbers do not matter
            at = (int(numbers[0]) + row) * SEQ_LEN % (len(tokens) - SEQ_LEN)
            out[row] = tokens[at : at + SEQ_LEN]
        return out

    return read


def phalanx(folder: Path) -> Read:
    """Return a reader of a run's samples on packed records: permuted, checked, placed in sources; the numbers are those of the run."""
    from phalanx.data.reading.dataset import RunData

    data = RunData.open(folder, SEQ_LEN, seed=0, within_documents=True)
    return lambda numbers: data.train_samples(int(numbers[0]), len(numbers))


def grain(folder: Path) -> Read:
    """Grain's map dataset over a source that slices the map, shuffled by its own permutation and batched."""
    import grain as pygrain

    class Records:
        def __init__(self) -> None:
            self._tokens = flat(folder)

        def __len__(self) -> int:
            return len(self._tokens) // SEQ_LEN

        def __getitem__(self, number: int) -> NDArray[np.int64]:
            return self._tokens[number * SEQ_LEN : (number + 1) * SEQ_LEN].astype(np.int64)

    dataset = pygrain.MapDataset.source(Records()).shuffle(seed=0)

    def read(numbers: NDArray[np.int64]) -> object:
        first = int(numbers[0])
        return np.stack([dataset[first + row] for row in range(len(numbers))])

    return read


def olmo(folder: Path, *, lengths: bool = False) -> Read:
    """OLMo-core's dataset of a fixed sequence length, which gives tensors of int64."""
    from olmo_core.data import NumpyFSLDataset

    dataset = NumpyFSLDataset(
        folder / "train-00000.bin",
        sequence_length=SEQ_LEN,
        pad_token_id=END,
        eos_token_id=END,
        vocab_size=END + 1,
        generate_doc_lengths=lengths,
        include_instance_metadata=False,
    )
    dataset.prepare()

    def read(numbers: NDArray[np.int64]) -> object:
        return [dataset[int(number)]["input_ids"] for number in numbers]

    return read


def megatron(folder: Path) -> Read:
    """Megatron-Core's indexed dataset, one item a record, copied to int64 as its GPT dataset does."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = folder / "megatron"
    if not (folder / "megatron.idx").exists():
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        tokens = flat(folder)
        for at in range(0, len(tokens), SEQ_LEN):
            builder.add_item(torch.from_numpy(tokens[at : at + SEQ_LEN].astype(np.int32)))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(str(prefix), multimodal=False, mmap=True)
    return lambda numbers: [torch.from_numpy(dataset[int(number)].astype(np.int64)) for number in numbers]


READERS: dict[str, Callable[[Path], Read]] = {
    "floor": floor,
    "phalanx": phalanx,
    "grain": grain,
    "olmo": olmo,
    "olmo-with-lengths": lambda folder: olmo(folder, lengths=True),
    "megatron": megatron,
}


def serve(name: str, folder: Path) -> None:
    """Run as a child: read the records of each line of numbers, and write the seconds that it took."""
    answers, sys.stdout = sys.stdout, sys.stderr
    read = READERS[name](folder)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seed, first, samples, batch = json.loads(line)
        count = len(flat(folder)) // SEQ_LEN
        # The readers that permute by themselves take runs of numbers; the others get a random order.
        alone = name in ("floor", "phalanx", "grain")
        numbers = np.arange(first, first + samples)
        if not alone:
            numbers = np.random.default_rng(seed).permutation(count)[:samples]
        start_s = time.perf_counter()
        for at in range(0, samples, batch):
            read(numbers[at : at + batch])
        print(json.dumps(time.perf_counter() - start_s), file=answers, flush=True)


class Child:
    """A reader in a Python of its own."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, __file__, "--serve", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            last_line = (self._process.communicate()[1].strip() or "no output").splitlines()[-1]
            raise RuntimeError(f"{name} does not start: {last_line}")

    def seconds(self, *order: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def write_records(folder: Path, tokens: int) -> None:
    """Write a packed dataset of documents with lengths like those of the web, of random bytes."""
    from phalanx.data.stored.index import HELD_OUT, TRAIN, DatasetIndex, Recipe, Split
    from phalanx.data.stored.shard_writer import ShardFolder, ShardWriter, commit
    from phalanx.data.tokenizers.tokenizer import BytesTokenizer

    partial = folder.with_name("partial")
    partial.mkdir()
    tokenizer = BytesTokenizer()
    tokenizer.save(partial)
    random = np.random.default_rng(0)
    splits = {}
    for name, size in ((TRAIN, tokens), (HELD_OUT, 0)):
        with ShardWriter(ShardFolder(partial, name), dtype="uint16", shard_tokens=tokens) as writer:
            for start in range(0, size, 1 << 22):
                part = random.integers(0, END, min(1 << 22, size - start), dtype=np.uint16)
                part[random.integers(0, len(part), len(part) // 820)] = END
                part[SEQ_LEN - 1 :: SEQ_LEN] = END
                writer.append(part)
            written = writer.close()
        splits[name] = Split(written.shards, documents=1, text_bytes=size, sha256=written.sha256)
    recipe = Recipe("", "bytes", None, 0.0, tokens, packed_seq_len=SEQ_LEN)
    index = DatasetIndex(
        "uint16",
        tokenizer.vocab_size,
        tokenizer.kind,
        tokenizer.fingerprint,
        splits[TRAIN],
        splits[HELD_OUT],
        None,
        recipe,
        document_mask=True,
    )
    commit(partial, folder, index)


def padding() -> dict[str, float]:
    """Return the padding of 2^24 tokens of documents, and the least that full records allow, in percent, by the length of records."""
    from phalanx.data.preparing.split_writer import WINDOW_TOKENS, Packer

    random, percent = np.random.default_rng(0), {}
    lengths = np.exp(random.normal(6.1, 1.1, 40_000)).astype(int) + 2
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), WINDOW_TOKENS))]
    for seq_len in (2048, 8192):
        packer = Packer(seq_len, END)
        records = [packer.add(np.zeros(length, dtype=np.uint32)) for length in lengths.tolist()]
        last = packer.flush()
        count = sum(len(packed) for packed in [*records, last] if packed is not None)
        tokens = count * seq_len - packer.padding_tokens
        least = -(-tokens // seq_len) * seq_len - tokens
        percent[f"{seq_len}"] = 100 * packer.padding_tokens / (count * seq_len)
        percent[f"{seq_len} least"] = 100 * least / (tokens + least)
    return percent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("grain", "olmo", "megatron"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="a Python that has it installed")
    parser.add_argument("--tokens", type=int, default=1 << 27)
    parser.add_argument("--samples", type=int, default=8192, help="records a turn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]))
        return
    pythons = {"phalanx": sys.executable}
    for name in PEERS:
        python = getattr(options, name.partition("-")[0])
        if python:
            pythons[name] = python
        else:
            print(f"{name}: left out, no Python with it was given", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch) / "dataset"
        write_records(folder, options.tokens)
        children = []
        for name, python in {"floor": sys.executable, **pythons}.items():
            try:
                children.append(Child(name, python, folder))
            except RuntimeError as error:
                print(error, file=sys.stderr)
        lowest, *readers = children
        ratios: dict[str, list[float]] = {child.name: [] for child in readers}
        rates: dict[str, list[float]] = {child.name: [] for child in children}
        available = options.tokens // SEQ_LEN - options.samples
        for turn in range(options.turns):
            order = (turn, turn * options.samples % available, options.samples, options.batch)
            for child in readers:
                before, own, after = (reader.seconds(*order) for reader in (lowest, child, lowest))
                ratios[child.name].append((before + after) / 2 / own)
                rates[child.name].append(options.samples * SEQ_LEN / own)
                rates[lowest.name].append(options.samples * SEQ_LEN / before)
        for child in children:
            child.close()
    rows = [
        {
            "reader": name,
            "million_tokens_per_s": statistics.median(rates[name]) / 1e6,
            "of_the_floor": statistics.median(ratios[name]) if ratios.get(name) else 1.0,
        }
        for name in rates
    ]
    if options.json:
        print(json.dumps({"readers": rows, "padding_percent": padding()}, indent=1))
        return
    for row in rows:
        print(f"{row['reader']:18} {row['million_tokens_per_s']:8.1f} M tokens/s   {row['of_the_floor']:.2f}")
    for name, share in padding().items():
        print(f"padding of records of {name}: {share:.3f}%")


if __name__ == "__main__":
    if "--serve" in sys.argv:  # started with the Python of a peer, which has no Phalanx
        main()
    else:
        from bench.running import run_bench

        run_bench(main)

"""What preparing files costs beside the tokenizer's own work: MB of text per second of CPU, from jsonl.zst to token shards.

    python bench/prepare_files.py [--mb 8] [--held-out 0.001] [--json]

The reference is ``tokenizers``' ``encode_batch_fast`` on the same texts, already in memory, in batches of the same size and in the same
process, each on one thread. It is measured before and after each preparation, since a machine that others use slows and quickens.
What is measured is the encode pass: uncompress, parse, split, encode, write shards and their sums. The pass before it, which
recognizes files and hashes texts, is said beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.preparing.corpus import python_stdlib
from phalanx.data.preparing.files import files_of
from phalanx.data.preparing.prepare import prepare
from phalanx.data.tokenizers.tokenizer import train_bpe

_BATCH_CHARACTERS = 1 << 21
_ROUNDS = 5


def main() -> None:
    """Print one table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=8.0, help="MB of text")
    parser.add_argument("--held-out", type=float, default=0.001)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = list(_texts(options.mb * 1e6))
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_bpe(texts[:600], vocab_size=32_768).save(folder)
        hf = HfTokenizer.from_file(str(folder / "tokenizer.json"))
        files = {
            name: _written(folder, name, texts)
            for name in ("texts.jsonl", "texts.jsonl.zst", "texts.parquet")
        }
        rates: dict[str, list[tuple[float, float]]] = {}
        for turn in range(_ROUNDS):
            for name, path in files.items():
                before_s = _encoding_s(hf, texts)
                reading_s, encoding_s = _prepare_s(path, folder, f"{turn}-{name}", options.held_out)
                reference_s = (before_s + _encoding_s(hf, texts)) / 2
                for what, cost_s in (
                    ("encode_batch_fast, texts in memory", reference_s),
                    (f"{name}: pass that encodes", encoding_s),
                    (f"{name}: pass that reads and hashes", reading_s),
                ):
                    rates.setdefault(what, []).append((text_mb / cost_s, reference_s / cost_s))
    rows = {
        what: {
            "mb_per_cpu_s": statistics.median(rate for rate, _ in found),
            "of_encode_batch_fast": statistics.median(ratio for _, ratio in found),
        }
        for what, found in rates.items()
    }
    if options.json:
        json.dump({"text_mb": text_mb, "rounds": _ROUNDS, "rows": rows}, sys.stdout)
        return
    print(f"{text_mb:.1f} MB of text, medians of {_ROUNDS}")
    for what, row in rows.items():
        print(f"{what:45} {row['mb_per_cpu_s']:8.2f} MB per CPU-s {row['of_encode_batch_fast']:8.3f}")


def _texts(wanted: float) -> Iterator[str]:
    """The standard library's files, again and again, each time with words that were not there before."""
    done, turn = 0, 0
    documents = python_stdlib()
    while True:
        for document in documents:
            text = document.text if turn == 0 else document.text.replace("self", f"self{turn}")
            yield text
            done += len(text)
            if done >= wanted:
                return
        turn += 1


def _written(folder: Path, name: str, texts: list[str]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    path = folder / name
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    else:
        content = lines.encode()
        path.write_bytes(zstandard.compress(content) if name.endswith(".zst") else content)
    return path


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _encoding_s(hf: HfTokenizer, texts: list[str]) -> float:
    def encode() -> None:
        batch: list[str] = []
        characters = 0
        for text in texts:
            batch.append(text)
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                hf.encode_batch_fast(batch, add_special_tokens=False)
                batch, characters = [], 0
        hf.encode_batch_fast(batch, add_special_tokens=False)

    return _cpu_s(encode)


def _prepare_s(path: Path, folder: Path, out: str, held_out: float) -> tuple[float, float]:
    """CPU seconds of the pass that reads and hashes, and of all after it."""
    start = time.process_time()
    begun: dict[str, float] = {}
    prepare(
        files_of([path]),
        folder / out,
        tokenizer=folder / "tokenizer.json",
        held_out_fraction=held_out,
        on_progress=lambda stage, _done, _total: begun.setdefault(stage, time.process_time()),
    )
    return begun["encode"] - start, time.process_time() - begun["encode"]


if __name__ == "__main__":
    main()

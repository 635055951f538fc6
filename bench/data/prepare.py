"""Preparation from a recipe against its parts: what reading, packing, checksums and manifests cost beside tokenizing.

    python -m bench.data.prepare [--mib 32] [--rounds 3] [--datatrove PYTHON]

Each figure is MB of text per second of processor time (all processes together). The yardstick is ``encode_batch_fast`` of the same tokenizer on the same texts, in
memory, in batches of 2 MiB on one thread, and for two processes that of two such side by side. Beside them, if ``--datatrove`` is set, datatrove's
``JsonlReader`` and ``DocumentTokenizer`` in one task, on the same files. Texts are the Python standard library's source in pieces of some 4 KiB, as ``.jsonl.zst`` in files of 8 MiB of text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"

import zstandard

from bench.running import run_bench
from phalanx.data.portions.clusters import Processes
from phalanx.data.portions.drive import carry_out, place_plan
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.portions.stages import Executor, InOrder
from phalanx.data.preparing.files import python_stdlib
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, train_bpe

_PIECE_CHARACTERS = 4096
_FILE_BYTES = 8 << 20
_BATCH_CHARACTERS = 1 << 21


def texts_of(mib: int) -> list[str]:
    """Return ``mib`` MiB of pieces of source code; further rounds are marked, so that no two pieces are equal."""
    pieces: list[str] = []
    size = round_number = 0
    while size < mib << 20:
        for document in python_stdlib():
            for start in range(0, len(document.text), _PIECE_CHARACTERS):
                pieces.append(f"# {round_number}\n" + document.text[start : start + _PIECE_CHARACTERS])
                size += len(pieces[-1].encode())
                if size >= mib << 20:
                    return pieces
        round_number += 1
    return pieces


def cpu_s() -> float:
    """Return the processor time of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(call: Callable[[], object]) -> tuple[float, float]:
    """Return (processor time, clock time) of a call, in s."""
    cpu, clock = cpu_s(), time.monotonic()
    call()
    return cpu_s() - cpu, time.monotonic() - clock


def encode(tokenizer: BpeTokenizer, texts: list[str]) -> None:
    """Encode the texts with the yardstick, in one thread."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            tokenizer._hf.encode_batch_fast(batch, add_special_tokens=False)
            batch, size = [], 0
    tokenizer._hf.encode_batch_fast(batch, add_special_tokens=False)


def encode_in_two(tokenizer: BpeTokenizer, texts: list[str]) -> None:
    """Encode half of the texts with the yardstick in each of two processes."""
    children = []
    for half in (texts[::2], texts[1::2]):
        if not (child := os.fork()):
            encode(tokenizer, half)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


DATATROVE = """
import json, os, sys, time
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
raw, out, tokenizer, end = sys.argv[1:]
steps = [
    JsonlReader(raw, compression="zstd", doc_progress=False),
    DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=end, shuffle_documents=False),
]
begun, clock = os.times(), time.monotonic()
LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=out + "-logs", skip_completed=False).run()
ended = os.times()
print(json.dumps([ended.user + ended.system - begun.user - begun.system, time.monotonic() - clock]))
"""


def by_datatrove(python: str, folder: Path, number: int, end: str) -> tuple[float, float]:
    """Return (processor time, clock time) of datatrove's pipeline, in s, without its imports."""
    command = [python, "-c", DATATROVE, str(folder / "raw"), str(folder / f"datatrove-{number}")]
    done = subprocess.run(
        [*command, str(folder / "tokenizer.json"), end],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    cpu, clock = json.loads(done.stdout.splitlines()[-1])
    return cpu, clock


def write_raw(folder: Path, texts: list[str]) -> None:
    """Write the texts as compressed JSON lines."""
    folder.mkdir()
    lines: list[bytes] = []
    size = files = 0
    for number, text in enumerate(texts):
        lines.append(json.dumps({"text": text}).encode() + b"\n")
        size += len(text)
        if size >= _FILE_BYTES or number == len(texts) - 1:
            (folder / f"{files:03d}.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines), 3))
            lines, size, files = [], 0, files + 1


def prepared(recipe: Path, out: Path, executor: Executor) -> None:
    """Prepare the dataset of a recipe, and end the workers."""
    carry_out(place_plan(read_recipe(recipe), recipe.parent, str(out)), executor)
    executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datatrove", default="", help="a Python that has datatrove")
    options = parser.parse_args()
    texts = texts_of(options.mib)
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = train_bpe(texts[:2000], vocab_size=32_768)
        tokenizer.save(folder)
        write_raw(folder / "raw", texts)
        kinds = {
            "joined": "",
            "packed": "",
            "exact duplicates": "[dedup]",
            "near duplicates": "[dedup]\nnear = {}",
        }
        for kind, dedup in kinds.items():
            seq_len = 0 if kind == "joined" else 2048
            (folder / f"{kind}.toml").write_text(
                f'[[source]]\nurl = "raw"\n{dedup}\n[output]\ntokenizer = "tokenizer.json"\nseq_len = {seq_len}\nportion_bytes = 100000\n'
            )
        runs: dict[str, Callable[[int], tuple[float, float]]] = {
            "encode_batch_fast, 2 processes": lambda _: measured(lambda: encode_in_two(tokenizer, texts)),
            **{
                kind: lambda number, kind=kind: measured(  # type: ignore[misc]
                    lambda: prepared(folder / f"{kind}.toml", folder / f"{kind}-{number}", InOrder())
                )
                for kind in kinds
            },
            **{
                f"packed, {workers} processes": lambda number, workers=workers: measured(  # type: ignore[misc]
                    lambda: prepared(
                        folder / "packed.toml", folder / f"processes-{workers}-{number}", Processes(workers)
                    )
                )
                for workers in (1, 2)
            },
        }
        if options.datatrove:
            runs["datatrove"] = lambda number: by_datatrove(
                options.datatrove, folder, number, tokenizer.end_token
            )
        figures = [
            round_of(runs, number, lambda: encode(tokenizer, texts)) for number in range(options.rounds)
        ]
    sys.stdout.write(f"{text_mb:.1f} MB of text, medians of {options.rounds}\n")
    for name in figures[0]:
        cpu, clock, ratio = (
            statistics.median(column) for column in zip(*(figure[name] for figure in figures), strict=True)
        )
        sys.stdout.write(
            f"{name:31} {text_mb / cpu:6.2f} MB per CPU-s  {ratio:5.2f} of encode_batch_fast  {text_mb / clock:6.2f} MB/s\n"
        )


def round_of(
    runs: dict[str, Callable[[int], tuple[float, float]]], number: int, yardstick: Callable[[], object]
) -> dict[str, tuple[float, float, float]]:
    """Return (processor time, clock time, ratio) of each; the yardstick is taken before and after each, since machines change their pace."""
    figures: dict[str, tuple[float, float, float]] = {}
    before = measured(yardstick)
    figures["encode_batch_fast in memory"] = (*before, 1.0)
    for name, run in runs.items():
        cpu, clock = run(number)
        after = measured(yardstick)
        figures[name] = cpu, clock, (before[0] + after[0]) / 2 / cpu
        before = after
    return figures


if __name__ == "__main__":
    run_bench(main)

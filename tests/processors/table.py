"""Numerics, kernels, exact serving and the first steps of the quickstart, under each instruction set of this machine and with several numbers of threads.

    PYTHONPATH=. python tests/processors/table.py

Prints a table of instruction sets and threads: tests that passed, failed and were skipped, and the hash of the weights after the first steps, in portable
and in native numerics. Tests assert equal bits, never which processor they run on. Exit code 1: a test failed, none passed, a training run failed, or the
portable hash differs between two cells. Native hashes are shown and not compared.

An instruction set is a limit on PyTorch's, oneDNN's and MKL's dispatchers, and a build of this project's kernels: without vectors, with AVX2, with all. It shows
which code each chooses, and not what another vendor's processor rounds otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.common.instruction_sets import LIMITS, instruction_sets

ROOT = Path(__file__).resolve().parents[2]
THREADS = (1, 2, 3, 8)
ONE_THREAD = (
    "tests/hardware/test_kernels.py",
    "tests/hardware/test_layer_kernels.py",
    "tests/hardware/portable",
    "tests/serve/test_numerics.py",
)
"""Tests of which a second number of threads shows nothing new."""
_ENGINE = "tests/serve/engine/test_engine.py::test_log_probabilities_are_the_trainers_to_the_bit"
ANY_THREADS = (
    "tests/serve/kv_cache/test_layer_cache.py",
    *(
        f"{_ENGINE}[{kind}]"
        for kind in (
            "dense-fp32",
            "badly cut widths-bf16",
            "latent-fp32",
            "wide mixture-fp32",
            "gated shared experts-bf16",
        )
    ),
)
SMALL = (
    "train.steps=2", "train.seq_len=32", "train.batch_size=2", "train.slots=2", "parallel.ranks=1", "evaluation.sequences=1",
    "data.path=data", 'data.corpus=["corpus.txt"]', "data.tokenizer=bytes", "sample.tokens=1",
)  # fmt: skip
"""Fields of ``configs/quickstart.toml`` that make its first steps a matter of seconds."""
OUTCOMES = ("passed", "failed", "skipped")
_HASH = re.compile(r"weights_sha256=([0-9a-f]{64})")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True)
class Cell:
    """Results under one instruction set with one number of threads."""

    counts: dict[str, int]
    portable: str
    native: str
    """Hashes of weights; empty if the run failed."""
    output: str
    """Output of what failed."""


def cell(name: str, threads: int, folder: Path) -> Cell:
    """Run the tests and both training runs of one cell in ``folder``."""
    environment = {**os.environ, **LIMITS[name], "GOMP_SPINCOUNT": "0"}
    tests = (*ONE_THREAD, *ANY_THREADS) if threads == 1 else ANY_THREADS
    counts, output = run_tests(tests, threads, environment)
    hashes = []
    for numerics in ("portable", "native"):
        weights, text = first_steps(numerics, threads, environment, folder / numerics)
        hashes.append(weights)
        output += "" if weights else text
    return Cell(counts, *hashes, output)


def run_tests(
    tests: tuple[str, ...], threads: int, environment: dict[str, str]
) -> tuple[dict[str, int], str]:
    """Return the counts of pytest's outcomes, and its output if a test failed."""
    arguments = ("-m", "not slow", "-p", "no:cacheprovider", *tests)
    done = subprocess.run(
        [sys.executable, "tests/processors/cell.py", str(threads), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    counts = {
        outcome: int(count)
        for count, outcome in _COUNT.findall(done.stdout.rpartition("\n=")[2] or done.stdout)
    }
    if done.returncode:
        counts["failed"] = counts.get("failed", 0) + counts.pop("error", 0) or 1
        return counts, done.stdout[-6000:] + done.stderr[-2000:]
    return counts, ""


def first_steps(numerics: str, threads: int, environment: dict[str, str], folder: Path) -> tuple[str, str]:
    """Return the hash of the weights after the first steps of the quickstart, empty if it failed, and the output."""
    folder.mkdir(parents=True)
    sources = sorted((ROOT / "src" / "phalanx" / "run").rglob("*.py"))
    (folder / "corpus.txt").write_text("".join(map(Path.read_text, sources))[:60_000])
    values = (*SMALL, f"runtime.numerics={numerics}", f"runtime.threads={threads}")
    command = [sys.executable, "-m", "phalanx", "train", str(ROOT / "configs" / "quickstart.toml")]
    done = subprocess.run(
        [*command, *(part for value in values for part in ("--set", value))],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    match = _HASH.search(done.stdout)
    return (match[1] if match and not done.returncode else ""), done.stdout[-3000:] + done.stderr[-3000:]


def problems_of(cells: Mapping[tuple[str, int], Cell]) -> list[str]:
    """Return a line for each failure of a table, whose keys are instruction sets and numbers of threads."""
    problems = []
    for (name, threads), result in cells.items():
        where = f"{name}, {threads} threads"
        if result.counts.get("failed", 0):
            problems.append(f"{where}: {result.counts['failed']} tests failed")
        if not result.counts.get("passed", 0):
            problems.append(f"{where}: no test passed")
        problems += [
            f"{where}: {numerics} numerics gave no hash: the run failed"
            for numerics, weights in (("portable", result.portable), ("native", result.native))
            if not weights
        ]
    if len({result.portable for result in cells.values()} - {""}) > 1:
        problems.append("portable numerics has other bits in some cells")
    return problems


def main() -> int:
    """Print the table; return the exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        places = [(name, threads) for name in instruction_sets() for threads in THREADS]
        cells = list(pool.map(lambda place: cell(*place, Path(scratch) / f"{place[0]}-{place[1]}"), places))
    heads = "".join(f"{outcome:>9}" for outcome in OUTCOMES)
    print(f"{'instructions':<14}{'threads':>8}{heads}  {'portable':<14}native")
    for (name, threads), result in zip(places, cells, strict=True):
        counts = "".join(f"{result.counts.get(outcome, 0):>9}" for outcome in OUTCOMES)
        hashes = f"{result.portable[:12] or 'failed':<14}{result.native[:12] or 'failed'}"
        print(f"{name:<14}{threads:>8}{counts}  {hashes}")
    print(f"{time.monotonic() - began:.0f} s")
    for place, result in zip(places, cells, strict=True):
        if result.output:
            print(f"\n{place[0]}, {place[1]} threads:\n{result.output}")
    problems = problems_of(dict(zip(places, cells, strict=True)))
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

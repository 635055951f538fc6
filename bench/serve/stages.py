"""Speed of a model in several processes: the overlap of its stages, and the gain from sharing each layer.

    python -m bench.serve.stages [--layers 8] [--dim 512] [--batches 1,2,4,8] [--tokens 24] [--rounds 5]

A model with random weights is saved by the real writers and served with exact numerics by two real processes of one thread each, divided by layers (``--pipeline 2``) and each layer
by itself (``--tensor 2``), and by one process of one thread. With two stages the same engine decodes the same texts in turns with one step under way at a time, as
if they waited for each other, and with two. Every way must return the same tokens and log-probabilities, by bits. A line for each number of texts has the medians of paired ratios of
tokens/s and their range: overlapping over waiting stages (the bound is 2, with as many cores), and two stages, or shares, over one process (the same bound).
Each of the processes has a core to itself if there are two idle ones; a busier machine makes the ratios smaller.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.common.saved_run import save_run
from bench.running import record, run_bench
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Request, Sampling, Token

_PROMPT = 64

Tokens = list[tuple[str, int, int, float]]
"""Tokens of all texts: name, place, token, log-probability."""


def opened(run: Path, **divided: int) -> Engine:
    """Return the engine of a run in the processes that ``divided`` names."""
    base = ServedRun(str(run), None, "float32", 512, 256 << 20, 256, "exact", **divided)
    engine = open_engine(base, print).engine
    assert isinstance(engine, Engine), "a run's transformer"
    return engine


def decode(engine: Engine, texts: int, tokens: int, name: str) -> tuple[float, Tokens]:
    """Return the tokens per second of so many texts, without the time of their prompts, and the tokens."""
    for number in range(texts):
        prompt = tuple((7 * number + 3 * place) % 256 for place in range(_PROMPT))
        engine.submit(Request(f"{name} {number}", prompt, tokens + 1, Sampling(seed=number), top_logprobs=0))
    decoded: Tokens = []
    began, before = 0.0, 0
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Token):
                decoded.append((event.request.split()[1], event.index, event.id, event.logprob))
        if not began and len({token[0] for token in decoded}) == texts:
            began, before = time.perf_counter(), len(decoded)
    return (len(decoded) - before) / (time.perf_counter() - began), sorted(decoded)


def with_in_flight(engine: Engine, steps: int) -> Engine:
    """Return the engine, with so many steps under way at a time."""
    engine.max_in_flight = steps
    return engine


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # for the other processes
    spec = ModelSpec(
        layers=options.layers,
        dim=options.dim,
        heads=options.dim // 64,
        kv_heads=options.dim // 128,
        vocab_size=4096,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        save_run(run, resolve(spec), seq_len=512)
        single, staged, shared = opened(run), opened(run, stages=2), opened(run, tensor=2)
        ways: dict[str, Callable[[], Engine]] = {
            "one process": lambda: single,
            "stages in turns": lambda: with_in_flight(staged, 1),
            "stages": lambda: with_in_flight(staged, 2),
            "shares": lambda: shared,
        }
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        for texts in map(int, options.batches.split(",")):
            report(ways, texts, options.tokens, options.rounds)


def report(ways: dict[str, Callable[[], Engine]], texts: int, tokens: int, rounds: int) -> None:
    """Print the line of a number of texts."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        tokens_of: list[Tokens] = []
        for name, way in ways.items():
            speed, decoded = decode(way(), texts, tokens, f"{name.replace(' ', '-')}-{texts}-{number}")
            speeds[name].append(speed)
            record({"way": name, "tokens_per_s": speed}, is_printed=False)
            tokens_of.append(decoded)
        assert all(decoded == tokens_of[0] for decoded in tokens_of), "two ways returned different bits"
    print(
        f"{texts} texts: {statistics.median(speeds['one process']):.1f} tokens/s in one process; "
        f"stages over stages in turns {ratios(speeds['stages'], speeds['stages in turns'])}, "
        f"over one process {ratios(speeds['stages'], speeds['one process'])}; "
        f"shares over one process {ratios(speeds['shares'], speeds['one process'])}; equal bits",
        flush=True,
    )


def ratios(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the median of paired ratios, and their range."""
    values = [a / b for a, b in zip(over, under, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    run_bench(main)

"""The cost of threads that hold their processors while they wait for each other, alone on a machine and beside other work.

A step of decoding and a step of training, each in processes of their own with GNU's default, 300,000 rounds of waiting before a thread sleeps (libgomp's manual,
"GOMP_SPINCOUNT"), and with fewer, in turns; first by themselves, then beside one process that computes on one thread all the time. Told is
the median seconds of a step, and the default's over the other's.

    python bench/thread_waits.py [--rounds 3] [--layers 8] [--waits 3000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.pop(0)  # this folder, whose ``store`` is not the tests'
sys.path.insert(0, str(Path(__file__).parent.parent))

_DEFAULT = 300_000
_STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--waits", type=int, default=3000, help="rounds of waiting, beside the default's")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(steps_s(given.layers)))
        return
    for beside in (0, 1):
        with busy(beside):
            taken: dict[tuple[str, int], list[float]] = {}
            for _ in range(given.rounds):
                for waits in (_DEFAULT, given.waits):
                    for what, seconds in measured(given.layers, waits).items():
                        taken.setdefault((what, waits), []).append(seconds)
        for what in ("decoding", "training"):
            usual, fewer = (statistics.median(taken[what, waits]) for waits in (_DEFAULT, given.waits))
            print(
                f"{what}, {beside} other processes: {usual * 1e3:.1f} ms by default, {fewer * 1e3:.1f} ms with {given.waits}, ratio {usual / fewer:.2f}",
                flush=True,
            )


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes compute meanwhile, on one thread each."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(layers: int, waits: int) -> dict[str, float]:
    """Median seconds of a step of each kind, in a process of its own."""
    command = [sys.executable, __file__, "--child", "--layers", str(layers)]
    done = subprocess.run(
        command, env={**os.environ, "GOMP_SPINCOUNT": str(waits)}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def steps_s(layers: int) -> dict[str, float]:
    """The same, in this process: one text is decoded, and forward and backward of 512 tokens are taken, at width 768."""
    import torch

    from bench.serve_engine import decode_s, engine, random_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    decoding = decode_s(engine(random_model(768, layers, torch.float32), "fast"), 1, _STEPS)
    model = random_model(768, layers, torch.float32).requires_grad_(True).train()
    tokens = torch.randint(0, 4096, (1, 512))
    taken = []
    for _ in range(_STEPS // 2):
        begin = time.perf_counter()
        model(tokens).float().logsumexp(-1).mean().backward()
        taken.append(time.perf_counter() - begin)
    return {"decoding": decoding, "training": statistics.median(taken)}


if __name__ == "__main__":
    main()

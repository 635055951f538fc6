"""Everything that watches a run, all together: time of a step with it over the time without, in one running process.

A run on two ranks is watched for some steps and not watched for the next ones, in turns (``bench.watch.watched_in_turns``), so that model, memory, processes and
the state of the machine are the same on both sides. Watching is: the ledger, the stopwatches of collectives, the ranks' exchange, the searches for spikes
and throttling, the look for requests for a profile, a logged step and a line of the log a step, the index, TensorBoard, and from outside the page with 50
viewers and one who never reads, whose /metrics is scraped every five seconds.

Each unit of four blocks gives one ratio, on over off; the figure is the geometric mean of all units with its 95 % interval (Student's t of the
logarithms), of the clock and of the ranks' processor time. Units are added until the interval of the clock's ratio is as narrow as ``--within``, or
``--most`` seconds are over. ``--idle`` watches nothing in any block: that ratio is 1 if the measurement is sound.

The ranks, the launcher and the page's server have the first half of the processors, as on the machine that trains; viewers and scraper have the other half, as
on machines of their own. ``--together`` gives all of them all processors.

    python -m bench.watch.everything_on                     # four to five minutes
    python -m bench.watch.everything_on --idle
    python -m bench.watch.everything_on --most 30 --dim 64 --viewers 5 --json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from bench.common.small_run import SmallRun
from bench.fleet.outside import children
from bench.running import run_bench
from bench.watch.page_viewers import page, processor_s, viewers
from bench.watch.watched_in_turns import BESIDE, ORDER, Block, Order, blocks_of, counts_as_on, environment_of
from phalanx.run.directory.files import write_atomically
from tiny_runs import make_dataset

RANKS = 2
SCRAPED_EVERY_S = 5.0
FEWEST_UNITS = 5
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)
"""Student's t for a two-sided interval of 95 %, by degrees of freedom from 1; the last one counts for all that are more."""


@contextmanager
def on_processors(processors: Sequence[int]) -> Iterator[None]:
    """Start processes inside the block on these processors alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def halves(*, together: bool) -> tuple[list[int], list[int]]:
    """Return the processors of the machine that trains, and those of all others."""
    every = sorted(os.sched_getaffinity(0))
    if together or len(every) < 2:
        return every, every
    return every[: len(every) // 2], every[len(every) // 2 :]


@contextmanager
def training(folder: Path, order: Order, dim: int, near: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run, and end it after the block."""
    make_dataset(folder / "data")
    small = SmallRun(
        *("everything", str(folder / "data"), 1_000_000, 128),
        *(4, dim, 3 * dim),
        train_fields="slots = 4\nmicro_batch_size = 2",
        checkpoint_fields="every_steps = 1000000",
        observe_fields='sinks = ["tensorboard"]\nlog_every_steps = 1\nmemory_at_step = 0',
        final_sequences=5,
    )
    file = small.write(folder / "run.toml")
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--ranks", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment_of(order)}
    command += ["--run-dir", str(folder / "runs" / "everything")]
    quiet = subprocess.DEVNULL
    with on_processors(near):
        process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watched(folder: Path, viewing: int, near: Sequence[int], far: Sequence[int]) -> Iterator[int]:
    """Start the page over the run with its viewers and a scraper, and write their process ids for the ranks. Yields the server's."""
    earlier = set(children(os.getpid()))
    over = threading.Event()
    with ExitStack() as stack:
        with on_processors(near):
            address, server = stack.enter_context(page(folder / "runs", folder / "cache"))
        with on_processors(far):
            stack.enter_context(viewers(address, viewing))
            threading.Thread(target=scrape, args=(address, over), daemon=True).start()
        beside = [pid for pid in children(os.getpid()) if pid not in earlier]
        time.sleep(3.0)  # all of them are there
        write_atomically(folder / "turns" / BESIDE, json.dumps(beside).encode(), durable=False)
        try:
            yield server
        finally:
            over.set()
            for pid in beside:
                os.kill(pid, signal.SIGCONT)


def scrape(address: str, over: threading.Event) -> None:
    """Request the metrics as a Prometheus does, again and again."""
    while not over.wait(SCRAPED_EVERY_S):
        with suppress(OSError), urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            answer.read()


def units_of(folder: Path) -> int:
    """Return the number of units that all ranks have written."""
    return min(len(blocks_of(folder / "turns", rank)) for rank in range(RANKS)) // len(ORDER)


def has_more_units(folder: Path, than: int) -> bool:
    """Return True if the ranks have written more than so many units."""
    return units_of(folder) > than


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a condition. End this program if the run ends before it is true."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"the run ended: see {folder}/runs/everything/logs")
        time.sleep(0.2)


def per_step(ranks: Sequence[Sequence[Block]], unit: int, meter: str) -> float:
    """Return the logarithm of on over off in one unit: of the first rank's clock, or of all ranks' processor time."""
    logs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(unit * len(ORDER), (unit + 1) * len(ORDER)):
        blocks = [rank[number] for rank in ranks]
        took_s = blocks[0].wall_s if meter == "clock" else sum(block.processor_s for block in blocks)
        logs[counts_as_on(number)].append(math.log(took_s / blocks[0].steps))
    return statistics.fmean(logs[True]) - statistics.fmean(logs[False])


def interval(logs: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean of ratios, its 95 % interval, and their median."""
    mean = statistics.fmean(logs)
    off = T_95[min(len(logs) - 1, len(T_95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    logs_of = {"ratio": mean, "low": mean - off, "high": mean + off, "median": statistics.median(logs)}
    return {name: math.exp(value) for name, value in logs_of.items()}


def measure(
    folder: Path, process: subprocess.Popen[bytes], most_s: float, within: float
) -> dict[str, object]:
    """Wait until the figure is narrow enough or the time is over."""
    began_s, units = time.monotonic(), 1
    while True:
        until(partial(has_more_units, folder, units), process, folder)
        units = units_of(folder)
        ranks = [blocks_of(folder / "turns", rank) for rank in range(RANKS)]
        clock = [per_step(ranks, unit, "clock") for unit in range(units)]
        clock_ratio = interval(clock)
        narrow = units >= FEWEST_UNITS and clock_ratio["high"] - clock_ratio["low"] <= 2 * within
        if narrow or time.monotonic() - began_s > most_s:
            break
    off = [block for block in ranks[0] if not counts_as_on(block.number)]
    return {
        "clock, on over off": clock_ratio,
        "processor time of the ranks, on over off": interval(
            [per_step(ranks, unit, "processor") for unit in range(units)]
        ),
        "units": units,
        "ratios of the clock": [round(math.exp(log), 4) for log in clock],
        "step_s": statistics.median(block.wall_s / block.steps for block in off),
        "seconds": time.monotonic() - began_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=float, default=250.0, help="seconds after which no unit is begun")
    parser.add_argument("--within", type=float, default=0.004, help="half of the interval, at which it ends")
    parser.add_argument(
        "--block", type=int, default=6, help="steps of a block, of which the first is not measured"
    )
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--idle", action="store_true", help="watch nothing in any block")
    parser.add_argument("--together", action="store_true", help="all on all processors")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no stopped process is left behind
    near, far = halves(together=options.together)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        order = Order(str(folder / "turns"), first_step=12, steps=options.block, idle=options.idle)
        with training(folder, order, options.dim, near) as process:
            until((folder / "runs" / "everything" / "events.jsonl").exists, process, folder)
            with watched(folder, options.viewers, near, far) as server:
                used_s, began_s = processor_s(server), time.monotonic()
                report = measure(folder, process, options.most, options.within)
                share = (processor_s(server) - used_s) / (time.monotonic() - began_s)
        # The server is stopped for half of the time.
        report |= {
            "server_share_of_a_core": 2 * share,
            "viewers": options.viewers,
            "processors": [len(near), len(far)],
            "load": os.getloadavg()[0],
        }
    print(json.dumps(report, indent=None if options.json else 1))


if __name__ == "__main__":
    run_bench(main)

"""Cost of the page: the time to answer, the server's memory, and the step time of a run with many viewers.

*Views*: 40 runs of 100,000 steps, written through the event log of real runs, are served by ``phalanx ui`` in a process of its own; each
view is requested twice, over HTTP: the first time after the server has started, when the run's file must be read, and again.
*Watchers*: a run on two ranks trains while 50 viewers, who follow its events and fetch its curves, and one who never reads, come and go. The median step
with them is compared with the mean of those before and after; ``noise`` is the difference among those without viewers.

    python -m bench.watch.page
    python -m bench.watch.page --views --runs 40 --steps 100000 --json
    python -m bench.watch.page --watchers --rounds 5 --period 30
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.running import run_bench
from bench.watch.many_runs import write_runs
from bench.watch.page_viewers import fetch, memory_mb, page, processor_s, viewers
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step

# --- views --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds until a view was there, the first time and the median of the next ones, the server's processor time of each, and the size."""

    view: str
    first_s: float
    first_processor_s: float
    again_s: float
    again_processor_s: float
    kilobytes: float


def timed(view: str, get: Callable[[], int], pid: int, again: int) -> Timing:
    """Time a request the first time, and again after the cached answer has expired."""
    times, used, size = [], [], 0
    for number in range(1 + again):
        time.sleep(1.1 if number else 0)
        used_s, began_s = processor_s(pid), time.perf_counter()
        size = get()
        times.append(time.perf_counter() - began_s)
        used.append(processor_s(pid) - used_s)
    return Timing(
        view, times[0], used[0], statistics.median(times[1:]), statistics.fmean(used[1:]), size / 1e3
    )


PATHS = (
    *("/curves?names=all", "", "/curves?names=loss&x=time", "/curves?names=loss&first=54000&last=55000"),
    *("/goodput?price_per_accelerator_hour=2", "/fleet", "/checkpoints"),
)


def views(folder: Path, again: int) -> dict[str, object]:
    """Time all views of the runs in ``folder``: at once, before the server has read ahead, and from its cache."""
    with tempfile.TemporaryDirectory() as cache:
        with page(folder, Path(cache)) as (address, pid):
            timings = [timed("list of all runs", lambda: len(fetch(f"{address}/api/runs")), pid, again)]
            ids = [run["id"] for run in json.loads(fetch(f"{address}/api/runs"))["runs"]]

            def get(path: str, run: str) -> Callable[[], int]:
                return lambda: len(fetch(f"{address}/api/run/{run}{path}"))

            timings += [
                timed(f"one run {path or '(summary)'}", get(path, ids[-1]), pid, again) for path in PATHS
            ]
            everything = [get("/curves?names=loss&points=600", run) for run in ids]
            timings.append(
                timed("loss of all runs", lambda: sum(curves() for curves in everything), pid, again=3)
            )
            memory = memory_mb(pid)
        with page(folder, Path(cache)) as (address, pid):
            everything = [get("/curves?names=loss&points=600", run) for run in ids]
            timings.append(
                timed(
                    "loss of all runs, a new server",
                    lambda: sum(curves() for curves in everything),
                    pid,
                    again=1,
                )
            )
    return {"timings": [vars(timing) for timing in timings], "memory_mb": memory, "runs": len(ids)}


# --- watchers -----------------------------------------------------------------------------------


RUN = """
name = "watched"
[model]
layers = 4
dim = 256
heads = 4
ffn_dim = 704
[data]
corpus = ["python-stdlib"]
[train]
steps = 100000
batch_size = 8
seq_len = 256
slots = 4
micro_batch_size = 2
[checkpoint]
every_steps = 1000
[evaluation]
every_steps = 0
final_sequences = 8
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
"""
UNMEASURED_STEPS = 5
SETTLING_S = 5.0


@contextmanager
def training(folder: Path) -> Iterator[Path]:
    """Start a run on two ranks, yield its event file, and end it after the block."""
    file = folder / "run.toml"
    file.write_text(RUN)
    run_dir = folder / "runs" / "watched"
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--ranks", "2", "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(steps_of(run_dir / "events.jsonl")) < UNMEASURED_STEPS:
            if process.poll() is not None:
                raise SystemExit(f"the run in {run_dir} ended: see its logs")
            time.sleep(1)
        yield run_dir / "events.jsonl"
    finally:
        process.terminate()
        process.wait()


def steps_of(file: Path) -> list[tuple[float, float]]:
    """Return the time at which each step was logged, and its seconds."""
    if not file.exists():
        return []
    return [(event.t, event.body.step_s) for event in read_events(file) if isinstance(event.body, Step)]


def watchers(folder: Path, rounds: int, period_s: float, number: int) -> dict[str, object]:
    """Measure step times of one run while viewers come and go; each period with them is compared with those before and after it."""
    periods: list[tuple[bool, float, float]] = []
    shares = []
    with page(folder / "runs", folder / "cache") as (address, pid), training(folder) as file:
        for turn in range(2 * rounds + 1):
            watched = turn % 2 == 1
            with viewers(address, number) if watched else nullcontext():
                time.sleep(SETTLING_S)
                began_s, used_s = time.time(), processor_s(pid)
                time.sleep(period_s)
                periods.append((watched, began_s, time.time()))
                if watched:
                    shares.append((processor_s(pid) - used_s) / period_s)
        steps = steps_of(file)
    medians = []
    for _, began_s, ended_s in periods:
        inside = [step_s for t, step_s in steps if began_s + step_s <= t <= ended_s]
        medians.append(statistics.median(inside) if inside else math.nan)
    ratios = [
        medians[turn] / statistics.fmean((medians[turn - 1], medians[turn + 1]))
        for turn in range(1, len(medians), 2)
    ]
    alone = medians[::2]
    return {
        "step_alone_s": alone,
        "step_watched_s": medians[1::2],
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "noise": [after / before for before, after in pairwise(alone)],
        "server_share_of_a_core": statistics.median(shares),
        "viewers": number,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--views", action="store_true", help="only the times of views")
    parser.add_argument(
        "--watchers", action="store_true", help="only the step times of a run that is watched"
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", type=int, default=5, help="times that a view is requested again")
    parser.add_argument("--period", type=float, default=30.0, help="seconds with viewers, and without")
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument(
        "--folder", type=Path, help="folder of the runs of --views; missing ones are written and kept"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps % 1000:
        parser.error("--steps: give a multiple of 1,000, since the runs restart at one of 500")
    both = options.views == options.watchers
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as made:
        if options.views or both:
            folder = options.folder or Path(made) / "many"
            write_runs(folder, options.runs, options.steps)
            report |= views(folder, options.again)
        if options.watchers or both:
            (Path(made) / "few" / "runs").mkdir(parents=True)
            report |= watchers(Path(made) / "few", options.rounds, options.period, options.viewers)
    print(json.dumps(report, indent=None if options.json else 1))


if __name__ == "__main__":
    run_bench(main)

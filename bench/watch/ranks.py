"""Cost of keeping and drawing the measurements that every rank makes of itself.

(a) A day of 100,000 ranks at 10 s a step, through the real writer: bytes on disk, seconds a frame, and how long the writing thread is busy with
    coarsening once the file is at its bound (``--days 4``).
(b) From that file, each in a process of its own: seconds of opening it, of a heat map of 800 x 400, of one rank's history, of the search for slow
    ranks, with the memory that the process took meanwhile (``cold``: the file's pages were dropped first).
(c) On two ranks, a real step with an exchange after each over the same step without: the median of paired ratios; and the exchange alone.
    By default a run exchanges after every tenth step.

    python -m bench.watch.ranks
    python -m bench.watch.ranks --ranks 8 --days 1 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.running import record, run_bench
from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame, RankStream, RankStreamWriter
from phalanx.run.layout import Layout
from phalanx_watch.ranks import newest_windows, slowest, values_of

STEP_S, WINDOW_STEPS = 10.0, 10
TYPICAL = {"compute_s": 0.6, "data_wait_s": 0.002, "memory_bytes": 6e10, "temperature_c": 62.0}
PAIRS = 40


def write_days(path: Path, ranks: int, days: float) -> dict[str, Any]:
    """Measure (a)."""
    random = np.random.default_rng(0)
    bases = [
        {name: (TYPICAL[name] * random.lognormal(0, 0.03, ranks)).astype(np.float32) for name in RANK_COLUMNS}
        for _ in range(8)
    ]
    seconds = []
    with RankStreamWriter(path) as writer:
        for number in range(round(days * 86_400 / STEP_S / WINDOW_STEPS)):
            columns = dict(bases[number % 8])
            columns["compute_s"] = columns["compute_s"].copy()
            columns["compute_s"][ranks // 3] *= 1.3  # one slow rank
            step = (number + 1) * WINDOW_STEPS
            frame = RankFrame(step, 1e9 + step * STEP_S, 0, ranks, columns, WINDOW_STEPS)
            begin = time.perf_counter()
            writer.append(frame)
            seconds.append(time.perf_counter() - begin)
    return {
        "frames written": len(seconds),
        "MB on disk": path.stat().st_size / 1e6,
        "ms a frame (median)": 1e3 * statistics.median(seconds),
        "ms a frame (p99)": 1e3 * float(np.quantile(seconds, 0.99)),
        "s of the longest (coarsening)": max(seconds),
    }


def _heat_map(stream: RankStream) -> None:
    picture = stream.heat_map("compute_s", most_columns=800, most_rows=400)
    assert picture.reduced or stream.ranks < 400


def _history(stream: RankStream) -> None:
    steps, _ = stream.rank("compute_s", stream.ranks // 3)
    assert len(steps)


def _slowest(stream: RankStream) -> None:
    frames = newest_windows(stream, 20)
    (slow_rank, *_) = slowest(
        "compute_s", values_of(stream, "compute_s", frames), Layout(replicate=stream.ranks), 10
    )
    assert slow_rank.rank == stream.ranks // 3
    assert slow_rank.slow


VIEWS: dict[str, tuple[Callable[[RankStream], None], ...]] = {
    "open": (),
    "heat map": (_heat_map,),
    "heat map again": (_heat_map, _heat_map),
    "history of a rank": (_history,),
    "history after a heat map": (_heat_map, _history),
    "slow ranks of 20 windows": (_slowest,),
}


def view(path: Path, name: str, pipe: Any) -> None:
    """Measure (b): the last of the view's calls."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset to the memory in use
    before = memory_mib("VmRSS")
    begin = time.perf_counter()
    with RankStream(path) as stream:
        for call in VIEWS[name]:
            begin = time.perf_counter()
            call(stream)
        seconds = time.perf_counter() - begin
    pipe.send((seconds, memory_mib("VmHWM") - before))


def memory_mib(name: str) -> float:
    """Return a line of this process's status in MiB: its memory (``VmRSS``), or its peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (status_line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(status_line.split()[1]) / 1024


def forget(path: Path) -> None:
    """Drop a file's pages from the cache, so that it must be read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def views(path: Path) -> dict[str, Any]:
    """Measure (b) for all views."""
    rows = {}
    context = multiprocessing.get_context("spawn")
    for name in VIEWS:
        for cold in (True, False):
            measurements = []
            for _ in range(1 if cold else 3):
                if cold:
                    forget(path)
                ours, theirs = context.Pipe()
                process = context.Process(target=view, args=(path, name, theirs))
                process.start()
                measurements.append(ours.recv())
                process.join()
            seconds, mib = (statistics.median(column) for column in zip(*measurements, strict=True))
            rows[f"{name}{', cold' if cold else ''}"] = {"s": seconds, "MiB": mib}
    return rows


def exchange_rank(rank: int, folder: str, pipe: Any) -> None:
    """Measure (c) on one rank."""
    import torch
    import torch.distributed as dist

    from bench.train.step import build_stepper, spec_for
    from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.step.meters import RankTimes

    arguments = argparse.Namespace(preset="toy-4m", batch=8, seq_len=256, compile=False)
    device = torch.device("cpu")
    spec = spec_for(arguments, 1)
    make_deterministic(spec, device)
    join(RankEnvironment(rank, 2, rank, (Path(folder) / "store").as_uri(), "phalanx"), device, 60.0)
    stepper, step = build_stepper(spec, device)
    ranks = RankTimes(stepper, 0, (1,))
    number = 0

    def seconds(work: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def with_exchange() -> None:
        nonlocal number
        number += 1
        step()
        ranks.step_ended(number)

    for _ in range(2):
        with_exchange()
    ratios, alone = [], []
    for pair in range(PAIRS):
        both = [with_exchange, step] if pair % 2 else [step, with_exchange]
        times = [seconds(work) for work in both]
        ratios.append(times[1 - pair % 2] / times[pair % 2])
        record({"pair": pair, "ratio": ratios[-1]}, is_printed=False)
        alone.append(seconds(lambda: ranks.step_ended(0)))
    pipe.send(
        {
            "step with over without (median of pairs)": statistics.median(ratios),
            "exchange alone, us": 1e6 * statistics.median(alone),
            "step, ms": 1e3 * statistics.median(seconds(step) for _ in range(5)),
        }
    )
    leave()


def exchange() -> dict[str, Any]:
    """Measure (c)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(target=exchange_rank, args=(rank, folder, pipes[rank][1])) for rank in range(2)
        ]
        for process in processes:
            process.start()
        reports: list[dict[str, Any]] = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
    return reports[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="folder for the file; by default a temporary one")
    parser.add_argument("--without-steps", action="store_true", help="leave (c) out, which takes minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "ranks.bin"
        result = {"writing": write_days(path, arguments.ranks, arguments.days), "reading": views(path)}
    if not arguments.without_steps:
        result["exchange"] = exchange()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for title, rows in result.items():
        print(title)
        for name, value in rows.items():
            numbers = value.items() if isinstance(value, dict) else [("", value)]
            print(f"  {name:<42}" + "  ".join(f"{number:>10,.4g} {unit}" for unit, number in numbers))


if __name__ == "__main__":
    run_bench(main)

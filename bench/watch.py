"""What the page costs: the time to answer, the server's memory, and the step time of a run that many look at.

*Views*: 40 runs of 100,000 steps, written through the event log that runs write through, are served by ``phalanx ui`` in a process of its own; each
view is asked for twice, over HTTP: the first time after the server has started, when the run's file must be read, and again.
*Watchers*: a run on two ranks trains while 50 viewers, who follow its events and fetch its curves, and one who never reads, come and go. The median step
with them is held against the mean of those before and after; ``noise`` is what those without viewers differ by among each other.

    python bench/watch.py
    python bench/watch.py --views --runs 40 --steps 100000 --json
    python bench/watch.py --watchers --rounds 5 --period 30
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import tomli_w

from phalanx.model.facts.presets import PRESETS
from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import (
    CheckpointSaved,
    Evaluated,
    Finished,
    MemoryMeasured,
    Restored,
    RunStarted,
    Step,
)
from phalanx.run.read import read_table, to_table

STEP_S = 10.0
BEGAN_S = 1.79e9
RESTARTED_AT = 0.6
KINDS = ("parameters", "gradients", "optimizer", "activations", "other", "total")


def write_run(folder: Path, number: int, steps: int) -> None:
    """Writes the events of a run of ``steps`` steps of ten seconds with one recovery, evaluations and checkpoints."""
    folder.mkdir(parents=True)
    describe(folder, number, steps)
    clock = [BEGAN_S + number]
    ledger = {
        "start.process": 30.0,
        "start.rendezvous": 20.0,
        "start.restore": 5.0,
        "start.warmup": 12.0,
        **dict.fromkeys(
            ("step.compute", "step.optimizer", "step.comm_exposed.dp", "step.comm_exposed.tp"), 0.0
        ),
        **dict.fromkeys(("step.bubble", "step.data_wait", "step.host_gap", "ckpt.blocking", "eval"), 0.0),
    }
    first, attempt = 1, 0
    while first <= steps:
        last = steps if attempt else int(RESTARTED_AT * steps)
        with EventLog(folder / "events.jsonl", attempt, clock=lambda: clock[0]) as log:
            log.append(
                RunStarted(
                    f"run-{number}", steps, ranks=1024, layout={"shard": 64, "tensor": 8}, device="cuda"
                )
            )
            if attempt:
                log.append(Restored(first - 1, "disk", 4.0, "node 7 was lost"))
            for step in range(first, last + 1):
                clock[0] += STEP_S
                for name, share in (
                    ("step.compute", 0.81),
                    ("step.comm_exposed.dp", 0.14),
                    ("step.data_wait", 0.01),
                    ("step.optimizer", 0.04),
                ):
                    ledger[name] += share * STEP_S
                log.append(_step(step, steps, number, ledger))
                if step % 500 == 0:
                    log.append(CheckpointSaved(step, f"checkpoints/step-{step:08d}", 3 << 40, 40.0, 0.2))
                    log.append(Evaluated(step, _loss(step, number) + 0.05, 0.9, 12.0))
                if step % 5000 == 1:
                    log.append(MemoryMeasured(step, dict.fromkeys(KINDS, 10 << 30)))
            if last == steps:
                log.append(Finished({"step": steps, "loss": 2.0, "weights_sha256": "ab" * 32}))
        first, attempt = last - last % 500 + 1, attempt + 1


def write_runs(folder: Path, runs: int, steps: int) -> None:
    """Writes those of the runs that are not in the folder yet, one on each core."""
    places = {number: folder / f"run-{number:02d}" for number in range(runs)}
    due = {number: place for number, place in places.items() if not place.exists()}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_run, due.values(), due, [steps] * len(due)))


def describe(folder: Path, number: int, steps: int) -> None:
    """Writes the run file and the record of a run, as a start of one does."""
    wanted = (f'name="run-{number}"', f"train.steps={steps}", f"runtime.seed={number}", 'data.path="nowhere"')
    spec = read_table({"model": {"preset": "llama3-8b"}}, PRESETS, wanted, folder / "run.toml")
    (folder / "run.toml").write_bytes(tomli_w.dumps(to_table(spec)).encode())
    (folder / "record.json").write_text(
        json.dumps({"identity": "0" * 64, "data_fingerprint": "0" * 64, "attempts": 2})
    )


def _loss(step: int, number: int) -> float:
    return 2.0 + 9.0 / math.sqrt(step) + 0.02 * math.sin(step * 0.7 + number)


def _step(step: int, steps: int, number: int, ledger: dict[str, float]) -> Step:
    jitter = 1 + 0.03 * math.sin(step * 1.3)
    return Step(
        step=step,
        steps=steps,
        loss=_loss(step, number) + (3.0 if step == 54_321 else 0.0),
        grad_norm=0.4 * jitter,
        lr=3e-4 * (1 - step / steps / 1.1),
        tokens=step * (1 << 22),
        tokens_per_s=420_000 * jitter,
        step_s=STEP_S / jitter,
        mfu=0.41 * jitter,
        bits_per_byte=0.9,
        goodput=0.96,
        ledger=ledger,
        peak_memory_bytes=71 << 30,
        logged_s=STEP_S,
        data_wait_s=0.1,
    )


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


@contextmanager
def page(folder: Path, cache: Path) -> Iterator[tuple[str, int]]:
    """``phalanx ui`` over a folder in a process of its own, with its cache in another: its address and process number."""
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", "0", "--no-open"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    address = process.stdout.readline().split()[0].rstrip("/")
    try:
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())


def memory_mb(pid: int) -> float:
    """Resident memory of a process now, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def processor_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(view: str, get: Callable[[], int], pid: int, again: int = 5) -> Timing:
    """Times a question the first time, and again when no answer is kept any more."""
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


def views(folder: Path) -> dict[str, object]:
    """Times of all views of the runs in ``folder``: at once, when a person asks before the server has read ahead, and from its cache."""
    with tempfile.TemporaryDirectory() as cache:
        with page(folder, Path(cache)) as (address, pid):
            found = [timed("list of all runs", lambda: len(fetch(f"{address}/api/runs")), pid)]
            ids = [run["id"] for run in json.loads(fetch(f"{address}/api/runs"))["runs"]]

            def get(path: str, one: str) -> Callable[[], int]:
                return lambda: len(fetch(f"{address}/api/run/{one}{path}"))

            found += [timed(f"one run {path or '(summary)'}", get(path, ids[-1]), pid) for path in PATHS]
            everything = [get("/curves?names=loss&points=600", one) for one in ids]
            found.append(timed("loss of all runs", lambda: sum(one() for one in everything), pid, again=3))
            memory = memory_mb(pid)
        with page(folder, Path(cache)) as (address, pid):
            everything = [get("/curves?names=loss&points=600", one) for one in ids]
            found.append(
                timed(
                    "loss of all runs, a new server", lambda: sum(one() for one in everything), pid, again=1
                )
            )
    return {"timings": [vars(one) for one in found], "memory_mb": memory, "runs": len(ids)}


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
    """A run on two ranks that goes on until it is ended: its event file."""
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
    """When each step was logged, and how long it took."""
    if not file.exists():
        return []
    return [(event.t, event.body.step_s) for event in read_events(file) if isinstance(event.body, Step)]


def view(address: str, over: Flag) -> None:
    """An open page: it hears of changes, and asks for the newest numbers after each."""
    while not over.is_set():
        with (
            suppress(OSError, ValueError),
            urllib.request.urlopen(f"{address}/api/events", timeout=20) as events,
        ):
            for line in events:
                if over.is_set():
                    return
                if line.startswith(b"data: ") and (run := json.loads(line[6:]).get("id")):
                    fetch(f"{address}/api/run/{run}")
                    fetch(f"{address}/api/run/{run}/curves?names=loss,lr,tokens_per_s&points=800")


@contextmanager
def viewers(address: str, number: int) -> Iterator[None]:
    """So many viewers, in a process of their own, and one here that asks and never reads."""
    port = int(address.rpartition(":")[2])
    stalled = socket.create_connection(("127.0.0.1", port))
    stalled.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    process = subprocess.Popen([sys.executable, __file__, "--view", address, "--viewers", str(number)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        stalled.close()


def watchers(folder: Path, rounds: int, period_s: float, number: int) -> dict[str, object]:
    """Step times of one run while viewers come and go; each time with them is held against those before and after it."""
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
    parser.add_argument("--period", type=float, default=30.0, help="seconds with viewers, and without")
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="where the runs of --views are, or are written and kept")
    parser.add_argument("--view", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.view:
        look(given.view, given.viewers)
        return
    both = given.views == given.watchers
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as made:
        if given.views or both:
            folder = given.folder or Path(made) / "many"
            write_runs(folder, given.runs, given.steps)
            report |= views(folder)
        if given.watchers or both:
            (Path(made) / "few" / "runs").mkdir(parents=True)
            report |= watchers(Path(made) / "few", given.rounds, given.period, given.viewers)
    print(json.dumps(report, indent=None if given.json else 1))


def look(address: str, number: int) -> None:
    """Looks, until it is ended; viewers belong to other machines, so they go last here."""
    os.nice(19)
    over = Flag()
    threads = [Thread(target=view, args=(address, over), daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

"""Time of a run with a recovery by part, from its ledger and from a process outside.

The observer (``bench.watch.observer``) shares nothing with the run: it has its own monotonic clock, looks through ``/proc`` for the first rank's process (in a
fleet, the worker that holds the event stream open), samples how long its main thread was running, was ready to run, or slept
(``/proc/PID/task/PID/schedstat``: the kernel's own account, in nanoseconds), and notes when the event file has grown; the lines are read
afterward, for their kinds and steps alone. It also makes the faults, so it has their times: it stops the other rank for some seconds, and kills it for good.

Each row is a part of the run's life by two accounts; the difference is printed as a share of the time held. A thread that waits in a collective does not only
sleep: it also sends, copies and adds, and waits in line for a processor; and it sleeps elsewhere too, for Python's lock or a disk. The
run's own processes note the seconds of each at the ends of each span of waiting, by the kernel's clocks (``bench.watch.spans_inside``). So the observer's
waiting is all the sleep that it saw, less the sleep elsewhere, plus the time that the thread ran and waited in line within the spans.

    python -m bench.watch.ledger                     # a fleet of two nodes and a spare; a peer is stopped twice and then killed
    python -m bench.watch.ledger --plain             # two ranks without a fleet: all is killed, and started again after a pause
    python -m bench.watch.ledger --steps 200 --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.common.small_run import SmallRun
from bench.running import run_bench
from bench.watch.observer import Observer, descendants, is_worker, kernel_s
from bench.watch.spans_inside import WAITING, Spent, environment_of
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Event, Step, decode
from phalanx.observe.goodput import goodput, ledger_of
from phalanx.run.directory.paths import RunDirectory
from tiny_runs import make_dataset

STOPPED_S = 4.0
PAUSE_S = 5.0


# --- the run, and its faults --------------------------------------------------------------------


@dataclass
class Watched:
    """A run that is over, and the observations of it."""

    observer: Observer
    faults: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Spans of the observer's clock in which processes were stopped or killed, by fault."""


def start(folder: Path, words: Sequence[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    data = folder / "data"
    if not data.exists():
        make_dataset(data)
    small = SmallRun(
        *("observed", str(data), options.steps, 64),
        *(4, options.dim, 2 * options.dim),
        train_fields="slots = 4\nmicro_batch_size = 2",
        checkpoint_fields="every_steps = 20",
        observe_fields="memory_at_step = 0",
        final_sequences=5,
    )
    small.write(folder / "run.toml")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(folder / "run.toml"),
        "--run-dir",
        str(folder / "run"),
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment_of(folder / "spans")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def peer_of(observer: Observer) -> int:
    """Return a worker that is not the writer."""
    workers = [pid for pid in descendants(observer.launcher) if is_worker(pid) and pid != observer.writer]
    at_work = 0.3 * kernel_s(observer.writer)[0]
    ranks = [pid for pid in workers if kernel_s(pid)[0] > at_work]  # a spare does nothing
    return max(ranks or workers, key=kernel_s)


def await_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    while f'"kind":"Step","step":{step},' not in read_text(RunDirectory(run_dir).events):
        if process.poll() is not None:
            raise SystemExit(f"the run ended before step {step}: see {run_dir}/logs")
        time.sleep(0.05)


def read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def stopped(watched: Watched, pid: int) -> None:
    """Stop a process for some seconds."""
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    watched.faults.setdefault("stopped", []).append((began_s, time.monotonic()))


def fleet(folder: Path, options: argparse.Namespace) -> Watched:
    """Train on a fleet of two nodes and a spare; stop a peer twice, and kill it."""
    process = start(folder, ("--nodes", "2", "--spares", "1", "--set", "fleet.worker_lease_s=30"), options)
    watched = Watched(Observer(process.pid, folder / "run", folder / "spans"))
    watched.observer.start()
    for share in (0.2, 0.35):
        await_step(folder / "run", int(share * options.steps), process)
        stopped(watched, peer_of(watched.observer))
    await_step(folder / "run", int(0.6 * options.steps), process)
    peer = peer_of(watched.observer)
    os.kill(peer, signal.SIGKILL)
    watched.faults["killed"] = [(time.monotonic(), time.monotonic())]
    process.wait()
    watched.observer.over.set()
    watched.observer.join()
    return watched


def plain(folder: Path, options: argparse.Namespace) -> Watched:
    """Train on two ranks; stop a peer, then kill all, and run the command again after a pause."""
    process = start(folder, ("--ranks", "2"), options)
    watched = Watched(Observer(process.pid, folder / "run", folder / "spans"))
    watched.observer.start()
    await_step(folder / "run", int(0.2 * options.steps), process)
    stopped(watched, peer_of(watched.observer))
    await_step(folder / "run", int(0.5 * options.steps), process)
    for pid in (process.pid, *descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    time.sleep(PAUSE_S)
    process = start(folder, ("--ranks", "2"), options)
    watched.observer.launcher = process.pid
    process.wait()
    watched.observer.over.set()
    watched.observer.join()
    return watched


# --- the two accounts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """An event of the ranks, and the time at which the observer saw its line."""

    event: Event
    seen_s: float


@dataclass(frozen=True)
class Compared:
    """A part of the run's time by two accounts, in seconds."""

    part: str
    ledger_s: float
    observed_s: float


def lines_of(watched: Watched) -> list[list[Line]]:
    """Return the events that carry a ledger, by attempt."""
    by_attempt: dict[int, list[Line]] = {}
    at = 0
    for line in watched.observer.events.read_bytes().splitlines(keepends=True):
        at += len(line)
        event = decode(line)
        if ledger_of(event):
            by_attempt.setdefault(event.attempt, []).append(Line(event, watched.observer.seen_s(at)))
    return [lines for _, lines in sorted(by_attempt.items())]


def spent(event: Event, *prefixes: str) -> float:
    """Return the seconds of the buckets whose names begin with a prefix; of all buckets without one."""
    return sum(
        seconds for name, seconds in ledger_of(event).items() if not prefixes or name.startswith(prefixes)
    )


@dataclass(frozen=True)
class Thread:
    """The first rank's main thread between the first and the last step of each life, summed: in all, as seen from outside, in the spans that
    the ledger books as waiting, and between them, as the process noted."""

    outside: Spent
    waiting: Spent
    elsewhere: Spent


def thread_of(steps: list[list[Line]], observer: Observer) -> Thread:
    """Return the account of the main thread in the steps."""
    lives = [observer.between(lines[0].seen_s, lines[-1].seen_s) for lines in steps]
    return Thread(*(sum(parts, Spent()) for parts in zip(*lives, strict=True)))


def compared(watched: Watched, in_fleet: bool) -> tuple[list[Compared], Thread]:
    """Return the parts of the run's life by both accounts, and the account of the main thread in its steps."""
    lives, observer = lines_of(watched), watched.observer
    rows, first = list[Compared](), lives[0][0]
    starts = [born(observer, lines[0].seen_s) for lines in lives]
    totals = goodput(read_events(observer.events))
    if not in_fleet:
        began = sum(lines[0].seen_s - start_s for lines, start_s in zip(lives, starts, strict=True))
        rows += [
            Compared(
                "held, from the process to the end",
                totals.total_ns / 1e9,
                sum(lines[-1].seen_s - start_s for lines, start_s in zip(lives, starts, strict=True)),
            ),
            Compared(
                "from the process to the first step", sum(spent(lines[0].event) for lines in lives), began
            ),
            Compared(
                "between two starts",
                totals.gap_ns / 1e9,
                sum(after - before[-1].seen_s for before, after in zip(lives, starts[1:], strict=False)),
            ),
        ]
    else:
        for before, after in pairwise(lives):
            rows.append(
                Compared(
                    "from the last step before the fault to the first after it",
                    spent(after[0].event),
                    after[0].seen_s - before[-1].seen_s,
                )
            )
        held_time_s = sum(spent(lines[-1].event) for lines in lives) - spent(first.event)
        rows.insert(
            0,
            Compared(
                "held, from the first step to the end", held_time_s, lives[-1][-1].seen_s - first.seen_s
            ),
        )
    steps = [[line for line in lines if isinstance(line.event.body, Step)] for lines in lives]
    rows.append(
        Compared(
            "between steps of one life",
            sum(spent(lines[-1].event) - spent(lines[0].event) for lines in steps),
            sum(lines[-1].seen_s - lines[0].seen_s for lines in steps),
        )
    )
    waited = sum(spent(lines[-1].event, *WAITING) - spent(lines[0].event, *WAITING) for lines in steps)
    thread = thread_of(steps, observer)
    slept_s = thread.outside.slept_s - thread.elsewhere.slept_s
    observed_s = slept_s + thread.waiting.ran_s + thread.waiting.in_line_s
    rows.append(Compared("of this, waiting", waited, observed_s))
    rows.append(
        Compared(
            "for the peer that was stopped",
            extra_wait(steps, watched.faults["stopped"]),
            sum(end_s - begin_s for begin_s, end_s in watched.faults["stopped"]),
        )
    )
    rows.append(
        Compared(
            "from the last step to the end",
            spent(lives[-1][-1].event) - spent(steps[-1][-1].event),
            lives[-1][-1].seen_s - steps[-1][-1].seen_s,
        )
    )
    return rows, thread


def born(observer: Observer, before_s: float) -> float:
    """Return the start time of the process that wrote the line seen at ``before_s``."""
    pids = {sample.pid for sample in observer.samples if abs(sample.at_s - before_s) < 0.2 and sample.pid}
    return min(observer.born[pid] for pid in pids)


def extra_wait(steps: list[list[Line]], spans: list[tuple[float, float]]) -> float:
    """Sum the ledger's waiting in the steps around the spans, beyond the usual waiting of such steps."""
    waits = [
        (before.seen_s, after.seen_s, spent(after.event, *WAITING) - spent(before.event, *WAITING))
        for lines in steps
        for before, after in pairwise(lines)
    ]
    usual = statistics.median(wait for _, _, wait in waits)
    hit = [
        wait
        for begin_s, end_s, wait in waits
        if any(begin_s < last_s and first_s < end_s for first_s, last_s in spans)
    ]
    return sum(hit) - usual * len(hit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="two ranks without a fleet")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        watched = (plain if options.plain else fleet)(Path(made).resolve(), options)
        rows, thread = compared(watched, in_fleet=not options.plain)
    held_s = rows[0].observed_s
    apart = [(row.ledger_s - row.observed_s) / held_s for row in rows]
    if options.json:
        print(
            json.dumps(
                {
                    "parts": [
                        {**asdict(row), "share_of_held": share}
                        for row, share in zip(rows, apart, strict=True)
                    ],
                    "thread": asdict(thread),
                }
            )
        )
        return
    print("| part of the run's time | ledger | observer | apart, of the time held |\n|---|---|---|---|")
    for row, share in zip(rows, apart, strict=True):
        print(f"| {row.part} | {row.ledger_s:.2f} s | {row.observed_s:.2f} s | {100 * share:+.2f} % |")
    print("\n| the main thread between steps | slept | ran | stood in line | in all |\n|---|---|---|---|---|")
    for name, times in (
        ("in what the ledger calls waiting", thread.waiting),
        ("in all else", thread.elsewhere),
        ("both, as seen from outside", thread.outside),
    ):
        print(
            f"| {name} | {times.slept_s:.2f} s | {times.ran_s:.2f} s | {times.in_line_s:.2f} s | {times.wall_s:.2f} s |"
        )


if __name__ == "__main__":
    run_bench(main)

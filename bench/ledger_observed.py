"""Where the time of a run with a recovery went, as its ledger says and as a process outside saw it.

The observer shares nothing with the run: it has its own monotonic clock, looks through ``/proc`` for the first rank's process (in a fleet, the worker that
holds the event stream open), samples how long its main thread was running, was ready to run, or slept (``/proc/PID/task/PID/schedstat``: the
kernel's own account, in nanoseconds), and notes when the event file has grown; what the lines said is looked at afterward, for their kinds and steps alone.
It also makes the faults, so it knows when they were: it stops the other rank for some seconds, and kills it for good.

Each row is a part of the run's life by two accounts; the difference is told as a share of the time held.

    PYTHONPATH=src:. python bench/ledger_observed.py                     # a fleet of two nodes and a spare; a peer is stopped twice and then killed
    PYTHONPATH=src:. python bench/ledger_observed.py --plain             # two ranks without a fleet: all is killed, and started again after a pause
    PYTHONPATH=src:. python bench/ledger_observed.py --steps 200 --json
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
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench.outside import children
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Event, Step, decode
from phalanx.observe.goodput import goodput, ledger_of
from phalanx.run.directory.paths import RunDirectory
from tiny_runs import make_dataset

RUN = """
name = "observed"
[model]
layers = 4
dim = {dim}
heads = 4
ffn_dim = {ffn_dim}
[data]
path = "{data}"
[train]
steps = {steps}
batch_size = 8
seq_len = 64
slots = 4
micro_batch_size = 2
[checkpoint]
every_steps = 20
[evaluation]
every_steps = 0
final_sequences = 5
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
"""
SAMPLE_S = 0.002
STOPPED_S = 4.0
PAUSE_S = 5.0


# --- the observer -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A reading of the processes at a moment of the observer's clock."""

    at_s: float
    pid: int
    """The process that writes the run's events; 0 if there is none."""
    busy_s: float
    """For which its main thread has been running or ready to run, since it began."""
    nbytes: int
    """Size of the event file."""


class Observer(threading.Thread):
    """Samples a run from outside until it is told that it is over."""

    def __init__(self, launcher: int, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.events, self.launcher, self.over = RunDirectory(run_dir).events, launcher, threading.Event()
        self.samples: list[Sample] = []
        self.born: dict[int, float] = {}
        """When each of the run's processes was first seen."""
        self.writer = 0

    def run(self) -> None:
        turn = 0
        while not self.over.is_set():
            now_s = time.monotonic()
            if turn % 10 == 0:
                self._look_around(now_s)
            self.samples.append(Sample(now_s, self.writer, busy_s(self.writer), size_of(self.events)))
            turn += 1
            time.sleep(SAMPLE_S)

    def _look_around(self, now_s: float) -> None:
        found = descendants(self.launcher)
        for pid in found:
            self.born.setdefault(pid, now_s)
        if not (self.writer in found and holds(self.writer, self.events)):
            self.writer = next((pid for pid in found if is_worker(pid) and holds(pid, self.events)), 0)

    def seen_s(self, nbytes: int) -> float:
        """When the event file was first seen to be so long."""
        place = bisect_left(self.samples, nbytes, key=lambda sample: sample.nbytes)
        return self.samples[min(place, len(self.samples) - 1)].at_s

    def busy_between(self, first_s: float, last_s: float) -> float:
        """Seconds for which the writer's main thread was running or ready to run; it was one process all the time."""
        inside = [sample for sample in self.samples if first_s <= sample.at_s <= last_s and sample.pid]
        return inside[-1].busy_s - inside[0].busy_s if inside else 0.0


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    found, due = list[int](), [pid]
    while due:
        own = children(due.pop())
        found += own
        due += own
    return found


def busy_s(pid: int) -> float:
    with suppress(OSError, ValueError):
        running, ready, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return (int(running) + int(ready)) / 1e9
    return 0.0


def size_of(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def holds(pid: int, path: Path) -> bool:
    """True if a process has the file open."""
    with suppress(OSError):
        names = os.listdir(f"/proc/{pid}/fd")
        return any(os.path.realpath(f"/proc/{pid}/fd/{name}") == str(path) for name in names)
    return False


# --- the run, and what befalls it ---------------------------------------------------------------


@dataclass
class Watched:
    """A run that is over, and what was seen of it."""

    observer: Observer
    faults: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By what was done to processes, the spans of the observer's clock in which it was."""


def start(folder: Path, words: Sequence[str], given: argparse.Namespace) -> subprocess.Popen[bytes]:
    data = folder / "data"
    if not data.exists():
        make_dataset(data)
    (folder / "run.toml").write_text(
        RUN.format(data=data, steps=given.steps, dim=given.dim, ffn_dim=2 * given.dim)
    )
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def peer_of(observer: Observer) -> int:
    """A worker that is not the writer."""
    workers = [pid for pid in descendants(observer.launcher) if is_worker(pid) and pid != observer.writer]
    ranks = [pid for pid in workers if busy_s(pid) > 0.3 * busy_s(observer.writer)]  # a spare does nothing
    return max(ranks or workers, key=busy_s)


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
    """Stops a process for some seconds."""
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    watched.faults.setdefault("stopped", []).append((began_s, time.monotonic()))


def fleet(folder: Path, given: argparse.Namespace) -> Watched:
    """A fleet of two nodes and a spare: a peer is stopped twice, and killed."""
    process = start(folder, ("--nodes", "2", "--spares", "1", "--set", "fleet.worker_lease_s=30"), given)
    watched = Watched(Observer(process.pid, folder / "run"))
    watched.observer.start()
    for share in (0.2, 0.35):
        await_step(folder / "run", int(share * given.steps), process)
        stopped(watched, peer_of(watched.observer))
    await_step(folder / "run", int(0.6 * given.steps), process)
    peer = peer_of(watched.observer)
    os.kill(peer, signal.SIGKILL)
    watched.faults["killed"] = [(time.monotonic(), time.monotonic())]
    process.wait()
    watched.observer.over.set()
    watched.observer.join()
    return watched


def plain(folder: Path, given: argparse.Namespace) -> Watched:
    """Two ranks: a peer is stopped, then all are killed, and the command is given again after a pause."""
    process = start(folder, ("--ranks", "2"), given)
    watched = Watched(Observer(process.pid, folder / "run"))
    watched.observer.start()
    await_step(folder / "run", int(0.2 * given.steps), process)
    stopped(watched, peer_of(watched.observer))
    await_step(folder / "run", int(0.5 * given.steps), process)
    for pid in (process.pid, *descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    time.sleep(PAUSE_S)
    process = start(folder, ("--ranks", "2"), given)
    watched.observer.launcher = process.pid
    process.wait()
    watched.observer.over.set()
    watched.observer.join()
    return watched


# --- the two accounts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """An event of the ranks, and when the observer saw its line."""

    event: Event
    seen_s: float


@dataclass(frozen=True)
class Compared:
    """A part of the run's time by two accounts, in seconds."""

    part: str
    ledger_s: float
    observed_s: float


def lines_of(watched: Watched) -> list[list[Line]]:
    """The events that carry a ledger, of each attempt that came to a step."""
    found: dict[int, list[Line]] = {}
    at = 0
    for line in watched.observer.events.read_bytes().splitlines(keepends=True):
        at += len(line)
        event = decode(line)
        if ledger_of(event):
            found.setdefault(event.attempt, []).append(Line(event, watched.observer.seen_s(at)))
    return [lines for _, lines in sorted(found.items())]


WAITING = ("step.comm_exposed", "step.wait_straggler", "step.data_wait", "step.bubble")


def spent(event: Event, *prefixes: str) -> float:
    """The seconds of the buckets that begin so; of all without one."""
    return sum(
        seconds for name, seconds in ledger_of(event).items() if not prefixes or name.startswith(prefixes)
    )


def compared(watched: Watched, in_fleet: bool) -> list[Compared]:
    """The parts of the run's life by both accounts."""
    lives, observer = lines_of(watched), watched.observer
    found, first = list[Compared](), lives[0][0]
    starts = [born(observer, lines[0].seen_s) for lines in lives]
    whole = goodput(read_events(observer.events))
    if not in_fleet:
        began = sum(lines[0].seen_s - start_s for lines, start_s in zip(lives, starts, strict=True))
        found += [
            Compared(
                "held, from the process to the end",
                whole.held_ns / 1e9,
                sum(lines[-1].seen_s - start_s for lines, start_s in zip(lives, starts, strict=True)),
            ),
            Compared(
                "from the process to the first step", sum(spent(lines[0].event) for lines in lives), began
            ),
            Compared(
                "between two starts",
                whole.gap_ns / 1e9,
                sum(after - before[-1].seen_s for before, after in zip(lives, starts[1:], strict=False)),
            ),
        ]
    else:
        for before, after in pairwise(lives):
            found.append(
                Compared(
                    "from the last step before the fault to the first after it",
                    spent(after[0].event),
                    after[0].seen_s - before[-1].seen_s,
                )
            )
        held = sum(spent(lines[-1].event) for lines in lives) - spent(first.event)
        found.insert(
            0, Compared("held, from the first step to the end", held, lives[-1][-1].seen_s - first.seen_s)
        )
    steps = [[line for line in lines if isinstance(line.event.body, Step)] for lines in lives]
    found.append(
        Compared(
            "between steps of one life",
            sum(spent(one[-1].event) - spent(one[0].event) for one in steps),
            sum(one[-1].seen_s - one[0].seen_s for one in steps),
        )
    )
    asleep = sum(
        one[-1].seen_s - one[0].seen_s - observer.busy_between(one[0].seen_s, one[-1].seen_s) for one in steps
    )
    waited = sum(spent(one[-1].event, *WAITING) - spent(one[0].event, *WAITING) for one in steps)
    found.append(Compared("of this, waiting (outside: the main thread slept)", waited, asleep))
    found.append(
        Compared(
            "for the peer that was stopped",
            extra_wait(steps, watched.faults["stopped"]),
            sum(end_s - begin_s for begin_s, end_s in watched.faults["stopped"]),
        )
    )
    found.append(
        Compared(
            "from the last step to the end",
            spent(lives[-1][-1].event) - spent(steps[-1][-1].event),
            lives[-1][-1].seen_s - steps[-1][-1].seen_s,
        )
    )
    return found


def born(observer: Observer, before_s: float) -> float:
    """When the process began that wrote the line which was seen then."""
    pids = {sample.pid for sample in observer.samples if abs(sample.at_s - before_s) < 0.2 and sample.pid}
    return min(observer.born[pid] for pid in pids)


def extra_wait(steps: list[list[Line]], spans: list[tuple[float, float]]) -> float:
    """Sums the waiting that the ledger has in the steps around the spans, beyond what such steps usually wait."""
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        watched = (plain if given.plain else fleet)(Path(made).resolve(), given)
        rows = compared(watched, in_fleet=not given.plain)
    held_s = rows[0].observed_s
    apart = [(row.ledger_s - row.observed_s) / held_s for row in rows]
    if given.json:
        print(
            json.dumps(
                [{**asdict(row), "share_of_held": share} for row, share in zip(rows, apart, strict=True)]
            )
        )
        return
    print("| part of the run's time | ledger | observer | apart, of the time held |\n|---|---|---|---|")
    for row, share in zip(rows, apart, strict=True):
        print(f"| {row.part} | {row.ledger_s:.2f} s | {row.observed_s:.2f} s | {100 * share:+.2f} % |")


if __name__ == "__main__":
    main()

"""Everything that watches a run, all together, over the same run with none of it: what a step costs more.

Three runs of one run file, each on two ranks, are started one after the other and then take turns: all processes of the others are stopped (SIGSTOP), so
that each has the machine alone for some seconds, and each round goes there and back (off, on, control, control, on, off).

*on*: the page over the run with 50 viewers and one who never reads, its /metrics scraped every second, TensorBoard as a sink, every step logged, ranks' own
times and memory, the structured logs, the record, the search for spikes, as users have them. *off*: what a run file can turn off is off; every fifth step is
logged, by which it is measured. *control*: as *off*; what it differs from *off* by is what two processes of one program differ by.

A turn counts from the first event after it has settled to its last one. Of each turn: seconds a step, and seconds of processor that the ranks took for a step.
Each turn is held against the *off* turn of its half of the round; the figure is the median of these ratios. The losses that the three have logged must be
equal, bit by bit.

    python bench/everything_on.py                     # four minutes
    python bench/everything_on.py --rounds 1 --turn 4 --viewers 5 --json
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
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.pop(0)  # this folder, whose ``store`` is not the tests'
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench.observer import descendants
from bench.outside import children
from bench.small_run import SmallRun
from bench.watch import page, processor_s, viewers
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step
from tiny_runs import make_dataset

OFF = "log_every_steps = 5\nranks_every_steps = 0\nmemory_at_step = 0\nsinks = []"
OBSERVE = {"off": OFF, "on": 'sinks = ["tensorboard"]', "control": OFF}
ROUND = ("off", "on", "control", "control", "on", "off")
SETTLING_S = 1.0
SAMPLE_S = 0.05
SCRAPED_EVERY_S = 1.0
WARM_STEPS = 10


@dataclass
class Turn:
    """Some seconds in which one run had the machine alone, in unix seconds; ``began_s`` is after it has settled."""

    name: str
    half: int
    began_s: float
    ended_s: float


@dataclass
class Runner:
    """A run that is there all the time, and goes on in its turns alone."""

    name: str
    events: Path
    process: subprocess.Popen[bytes]
    beside: list[int] = field(default_factory=list)
    """Processes that watch it, which are stopped with it."""
    used: list[tuple[float, float]] = field(default_factory=list)
    """Readings of its ranks' processor time: at which unix second, and how many seconds they had used."""

    def ranks(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]

    def signal(self, number: signal.Signals) -> None:
        for pid in (*self.ranks(), *self.beside):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def sample(self) -> None:
        with suppress(OSError):
            self.used.append((time.time(), sum(processor_s(pid) for pid in self.ranks())))


@contextmanager
def runner(name: str, folder: Path, dim: int) -> Iterator[Runner]:
    """The run of that name, after its first steps, standing still."""
    file, run_dir = folder / f"{name}.toml", folder / "runs" / name
    small = SmallRun(
        *("everything", str(folder / "data"), 1_000_000, 128),
        *(4, dim, 3 * dim),
        train_fields="slots = 4\nmicro_batch_size = 2",
        checkpoint_fields="every_steps = 1000000",
        observe_fields=OBSERVE[name],
        final_sequences=5,
    )
    small.write(file)
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--ranks", "2", "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    made = Runner(name, run_dir / "events.jsonl", process)
    try:
        while not (steps := steps_of(made.events)) or steps[-1][1] < WARM_STEPS:
            if process.poll() is not None:
                raise SystemExit(f"the run {name} ended: see {run_dir}/logs")
            time.sleep(0.5)
        made.signal(signal.SIGSTOP)
        yield made
    finally:
        made.signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def steps_of(file: Path) -> list[tuple[float, int]]:
    """When each logged step was written, and its number."""
    if not file.exists():
        return []
    return [(event.t, event.body.step) for event in read_events(file) if isinstance(event.body, Step)]


def losses_of(file: Path) -> dict[int, float]:
    """The loss of each logged step."""
    return {event.body.step: event.body.loss for event in read_events(file) if isinstance(event.body, Step)}


@contextmanager
def watched(one: Runner, folder: Path, number: int) -> Iterator[int]:
    """A page over the run with its viewers and a scraper, all of which stand still when it does: the server's process."""
    known = set(children(os.getpid()))
    over = threading.Event()
    with page(one.events.parent, folder / "cache") as (address, server), viewers(address, number):
        one.beside = [pid for pid in children(os.getpid()) if pid not in known]

        def scrape() -> None:
            while not over.wait(SCRAPED_EVERY_S):
                with suppress(OSError), urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
                    answer.read()

        threading.Thread(target=scrape, daemon=True).start()
        try:
            time.sleep(SETTLING_S)
            one.signal(signal.SIGSTOP)
            yield server
        finally:
            over.set()
            one.signal(signal.SIGCONT)


def take_turns(runs: dict[str, Runner], rounds: int, turn_s: float) -> list[Turn]:
    """Lets the runs go on by turns."""
    turns = []
    for number in range(rounds):
        for place, name in enumerate(ROUND):
            one = runs[name]
            one.signal(signal.SIGCONT)
            time.sleep(SETTLING_S)
            began_s = time.time()
            while time.time() < began_s + turn_s:
                one.sample()
                time.sleep(SAMPLE_S)
            one.sample()
            turns.append(Turn(name, 2 * number + (place >= len(ROUND) // 2), began_s, time.time()))
            one.signal(signal.SIGSTOP)
    return turns


def used_at(samples: Sequence[tuple[float, float]], moment_s: float) -> float:
    """The processor time at a moment, between the samples around it."""
    before = max((one for one in samples if one[0] <= moment_s), default=samples[0])
    after = min((one for one in samples if one[0] >= moment_s), default=samples[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment_s - before[0]) / (after[0] - before[0])


def of_turn(turn: Turn, one: Runner, steps: list[tuple[float, int]]) -> tuple[float, float]:
    """Seconds a step, and processor seconds of all ranks a step, in a turn."""
    inside = [(t, step) for t, step in steps if turn.began_s <= t <= turn.ended_s]
    if len(inside) < 2:
        raise SystemExit(f"the run {one.name} logged {len(inside)} steps in a turn: make --turn longer")
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    used_s = used_at(one.used, last_s) - used_at(one.used, first_s)
    return (last_s - first_s) / (last - first), used_s / (last - first)


def report_of(runs: dict[str, Runner], turns: list[Turn]) -> dict[str, object]:
    """Each turn over the *off* turn of its half of a round."""
    steps = {name: steps_of(one.events) for name, one in runs.items()}
    found = {(turn.name, turn.half): of_turn(turn, runs[turn.name], steps[turn.name]) for turn in turns}
    losses = [losses_of(one.events) for one in runs.values()]
    common = sorted(set.intersection(*map(set, losses)))
    if any(len({of[step] for of in losses}) > 1 for step in common):
        raise SystemExit("the runs' losses differ: something that watches has changed their bits")
    halves = sorted({turn.half for turn in turns})
    report: dict[str, object] = {
        "halves": len(halves),
        "equal losses up to step": common[-1],
        "step_s": statistics.median(found["off", half][0] for half in halves),
        "processor_s_of_a_step": statistics.median(found["off", half][1] for half in halves),
    }
    for name in ("on", "control"):
        for place, what in enumerate(("wall", "processor")):
            ratios = sorted(found[name, half][place] / found["off", half][place] for half in halves)
            report[f"{name} over off, {what}"] = {
                "median": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4, method="inclusive")[::2],
                "all": ratios,
            }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn", type=float, default=5.0, help="seconds that are measured of each turn")
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no run is left behind, standing still
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        make_dataset(folder / "data")
        runs = {name: stack.enter_context(runner(name, folder, given.dim)) for name in OBSERVE}
        runs["on"].signal(signal.SIGCONT)
        server = stack.enter_context(watched(runs["on"], folder, given.viewers))
        used_s = processor_s(server)
        turns = take_turns(runs, given.rounds, given.turn)
        ran_s = sum(turn.ended_s - turn.began_s + SETTLING_S for turn in turns if turn.name == "on")
        report = {
            **report_of(runs, turns),
            "server_share_of_a_core": (processor_s(server) - used_s) / ran_s,
            "viewers": given.viewers,
            "load": os.getloadavg()[0],
        }
    print(json.dumps(report, indent=None if given.json else 1))


if __name__ == "__main__":
    main()

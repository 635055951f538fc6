"""How long after a problem is planted in a real run ``phalanx why`` names it.

Each problem happens to a run of real processes on this machine, while a second process, this one, asks again and again what is wrong, as
``phalanx why --watch`` does. The clock starts when the problem does: with the event of the step before a fault, or with the change on disk.

    python bench/why.py [NAME ...] [--write docs/watching.md]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Event, Step
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.why.reasons import reasons
from phalanx_process import RUN_FILE
from spiking_runs import SPIKE, make_noise
from tiny_runs import make_dataset

POLL_S = 0.2
PATIENCE_S = 90.0
BEGIN, END = "<!-- why: begin -->", "<!-- why: end -->"


def _nothing(_folder: Path, _process: int) -> None:
    """Does nothing: the fault comes by itself."""


@dataclass(frozen=True)
class Problem:
    """A problem, and how it is planted."""

    name: str
    code: str
    """The reason that must be given."""
    words: tuple[str, ...]
    """The words after ``phalanx train``."""
    from_step: int
    """The step before which nothing is wrong yet."""
    plant: Callable[[Path, int], None] = _nothing
    """Plants the problem when that step is reached; takes the folder and the number of the run's process."""
    spiking: bool = False

    @property
    def planted(self) -> bool:
        """True if it begins with what is done here, and not with a fault of the run's own."""
        return self.plant is not _nothing


def other_data(folder: Path, _process: int) -> None:
    """Puts another version of the dataset in the place of the first."""
    make_dataset(folder / "other", "another")
    os.rename(folder / "words", folder / "old")
    os.rename(folder / "other", folder / "words")


def killed(_folder: Path, process: int) -> None:
    """Kills the run as a machine does that loses its power."""
    os.killpg(process, signal.SIGKILL)


def stopped(_folder: Path, process: int) -> None:
    """Has all of the run's processes stand still."""
    os.killpg(process, signal.SIGSTOP)


FLEET = ("--nodes", "3", "--spares", "1", "--set", "fleet.lease_s=4", "--set", "fleet.heartbeat_s=1")
LONG = ("--set", "train.steps=3000", "--set", "evaluation.every_steps=0")
PROBLEMS = (
    Problem(
        "NaN on one node",
        "not-finite",
        (*LONG, *FLEET, "--spares", "0", "--fault", "nan rank 1 from step 12"),
        11,
    ),
    Problem("loss spike", "loss-spike", ("--ranks", "2"), SPIKE - 1, spiking=True),
    Problem(
        "lost node, no spare",
        "lost-node",
        (*LONG, *FLEET, "--spares", "0", "--fault", "kill node 1 at step 12"),
        11,
    ),
    Problem(
        "straggler",
        "straggler",
        (
            *LONG,
            *FLEET,
            "--set",
            "fleet.straggler_window_steps=5",
            "--fault",
            "slow rank 1 by 4x from step 30",
        ),
        29,
    ),
    Problem("full disk", "checkpoint-failed", (*LONG, *FLEET, "--fault", "fill disk at step 12"), 11),
    Problem("another data version", "other-data", (*LONG, "--ranks", "2"), 12, other_data),
    Problem("killed without a word", "gone", (*LONG, "--ranks", "2"), 12, killed),
    Problem("all processes stand still", "stalled", (*LONG, "--ranks", "2"), 30, stopped),
)


def measure(problem: Problem) -> tuple[float | None, str]:
    """Seconds until the problem was named, and the title; ``None`` if it never was."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file, run = run_file(folder, problem), RunDirectory(folder / "run")
        words = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            str(file),
            "--run-dir",
            str(run.path),
            *problem.words,
        ]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            began = await_step(run, problem.from_step)
            problem.plant(folder, process.pid)
            began = time.time() if problem.planted else began
            return await_reason(run, problem.code, began)
        finally:
            for number in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
            process.wait()


def run_file(folder: Path, problem: Problem) -> Path:
    words = make_dataset(folder / "words")
    text = RUN_FILE.format(data=words)
    if problem.spiking:
        sources = "".join(
            f'[[data.sources]]\nname = "{name}"\npath = "{path}"\nweights = {weights}\nepochs = 0\n'
            for name, path, weights in (
                ("words", words, [1, 0, 1]),
                ("noise", make_noise(folder / "noise"), [0, 1, 0]),
            )
        )
        text = text.replace(f'path = "{words}"', f"stages = [0, {SPIKE - 1}, {SPIKE}]\n{sources}")
        text = text.replace("slots = 8", "slots = 8\nspike_window = 8")
    file = folder / "run.toml"
    file.write_text(text)
    return file


def await_step(run: RunDirectory, step: int) -> float:
    """Waits until a step is done; returns the time at which it was."""

    def counts(event: Event) -> bool:
        return isinstance(event.body, Step) and event.body.step == step

    deadline = time.time() + PATIENCE_S
    while time.time() < deadline:
        try:
            if (found := newest_event(run.events, counts)) is not None:
                return found.t
        except EventLogError:
            pass
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was never done")


def await_reason(run: RunDirectory, code: str, began: float) -> tuple[float | None, str]:
    while time.time() < began + PATIENCE_S:
        found = [one for one in reasons(run, time.time()) if one.code == code]
        if found:
            return time.time() - began, f"{found[0].title} ({found[0].evidence[0]})"
        time.sleep(POLL_S)
    return None, ""


def table(rows: list[tuple[Problem, float | None, str]]) -> str:
    lines = ["| problem | named as | what it said | seconds until named |", "|---|---|---|---|"]
    for problem, seconds, title in rows:
        took = "never" if seconds is None else f"{seconds:.1f}"
        lines.append(f"| {problem.name} | `{problem.code}` | {title} | {took} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = []
    for problem in PROBLEMS:
        if arguments.names and problem.name not in arguments.names:
            continue
        try:
            seconds, title = measure(problem)
        except TimeoutError as error:
            seconds, title = None, str(error)
        rows.append((problem, seconds, title))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if arguments.write:
        before, _, rest = arguments.write.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        arguments.write.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()

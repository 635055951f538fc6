"""How long after a problem is planted in a real run the page, an alert and ``phalanx why`` name it.

Each problem happens to a run of real processes on this machine. Meanwhile ``phalanx why --json`` is started again and again, a ``phalanx ui``
is asked for what its box shows (``/api/run/ID/why``), and Debian's Prometheus scrapes the run every half second, with the shipped rules. The clock
starts when the problem does: with the event of the step before a fault, or with the change on disk. Rules that wait for minutes are evaluated with windows
of ten seconds and without their ``for``, which is written beside the time.

    python bench/why.py [NAME ...] [--write docs/watching.md]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from deploy.prometheus_rules import alerts
from deploy.servers import Prometheus, free_port, prometheus
from deploy.test_real_prometheus import shortened
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Event, Step
from phalanx.run.directory.paths import RunDirectory
from phalanx_process import RUN_FILE
from spiking_runs import SPIKE, make_noise
from tiny_runs import make_dataset

POLL_S = 0.2
PATIENCE_S = 40.0
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
    alerts: tuple[str, ...] = ()
    """The rules of ``deploy/prometheus`` that are there for it."""

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
LONG = ("--set", "train.steps=100000", "--set", "evaluation.every_steps=0")
PROBLEMS = (
    Problem(
        "NaN on one node",
        "not-finite",
        (*LONG, *FLEET, "--spares", "0", "--fault", "nan rank 1 from step 12"),
        11,
        alerts=("PhalanxNotFinite", "PhalanxNodeUnfit"),
    ),
    Problem(
        "loss spike",
        "loss-spike",
        (*LONG, "--ranks", "2", "--set", "train.batch_size=512"),
        SPIKE - 1,
        spiking=True,
        alerts=("PhalanxLossSpike",),
    ),
    Problem(
        "lost node, no spare",
        "lost-node",
        (*LONG, *FLEET, "--spares", "0", "--fault", "kill node 1 at step 12"),
        11,
        alerts=("PhalanxSparesExhausted", "PhalanxAgentGone"),
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
        alerts=("PhalanxStraggler",),
    ),
    Problem(
        "full disk",
        "checkpoint-failed",
        (*LONG, *FLEET, "--fault", "fill disk at step 12"),
        11,
        alerts=("PhalanxCheckpointFailing", "PhalanxDiskFilling"),
    ),
    Problem("another data version", "other-data", (*LONG, "--ranks", "2"), 12, other_data),
    Problem(
        "killed without a word",
        "gone",
        (*LONG, "--ranks", "2"),
        12,
        killed,
        alerts=("PhalanxNoStep", "PhalanxCoordinatorGone"),
    ),
    Problem(
        "all processes stand still",
        "stalled",
        (*LONG, "--ranks", "2"),
        30,
        stopped,
        alerts=("PhalanxNoStep", "PhalanxCoordinatorGone"),
    ),
)


@dataclass(frozen=True)
class Named:
    """Seconds until one of the three named the problem, and its words; ``None`` if it never did."""

    seconds: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Row:
    """The ways in which a problem was found, and after how many seconds."""

    problem: Problem
    page: Named
    alert: Named
    why: Named


def measure(problem: Problem) -> Row:
    """Plants the problem in a run, and asks all three until each has named it or patience ends."""
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place), free_port(8)
        file, run = run_file(folder, problem), RunDirectory(folder / "runs" / "run")
        settings = ("--run-dir", str(run.path), "--set", f"observe.metrics_port={port}", *problem.words)
        words = [sys.executable, "-m", "phalanx", "train", str(file), *settings]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            (folder / "runs").mkdir(exist_ok=True)
            targets = f"http://127.0.0.1:{port}/targets"
            with (
                prometheus(folder / "prometheus", targets, shorten=shortened) as client,
                page(folder / "runs") as address,
            ):
                began = await_step(run, problem.from_step)
                problem.plant(folder, process.pid)
                began = time.time() if problem.planted else began
                with ThreadPoolExecutor(3) as pool:
                    asked = (
                        pool.submit(await_reason, lambda: of_page(address), problem.code, began),
                        pool.submit(await_alert, client, problem.alerts, began),
                        pool.submit(await_reason, lambda: of_command(run), problem.code, began),
                    )
                    return Row(problem, *(one.result() for one in asked))
        finally:
            for number in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
            process.wait()


@contextmanager
def page(folder: Path) -> Iterator[str]:
    """``phalanx ui`` over a folder in a process of its own: its address."""
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", "0", "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0].rstrip("/")
    finally:
        process.terminate()
        process.wait()


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def of_page(address: str) -> list[dict[str, Any]]:
    """The reasons in the page's box."""
    (run, *_) = fetch(f"{address}/api/runs")["runs"]
    found: list[dict[str, Any]] = fetch(f"{address}/api/run/{run['id']}/why")["reasons"]
    return found


def of_command(run: RunDirectory) -> list[dict[str, Any]]:
    """The reasons that ``phalanx why --json`` gives."""
    words = [sys.executable, "-m", "phalanx", "why", str(run.path), "--json"]
    found: list[dict[str, Any]] = json.loads(subprocess.run(words, capture_output=True, check=False).stdout)[
        "reasons"
    ]
    return found


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

    deadline = time.time() + 3 * PATIENCE_S
    while time.time() < deadline:
        try:
            if (found := newest_event(run.events, counts)) is not None:
                return found.t
        except EventLogError:
            pass
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was never done")


def await_reason(ask: Callable[[], list[dict[str, Any]]], code: str, began: float) -> Named:
    while time.time() < began + PATIENCE_S:
        found = [one for one in ask() if one["code"] == code]
        if found:
            return Named(time.time() - began, f"{found[0]['title']} ({found[0]['evidence'][0]})")
        time.sleep(POLL_S)
    return Named()


def await_alert(client: Prometheus, names: tuple[str, ...], began: float) -> Named:
    """The first of the alerts to fire after the problem began; one that fired before says nothing of it."""
    waits = {str(rule["alert"]): str(rule.get("for", "")) for rule in alerts()}
    while names and time.time() < began + PATIENCE_S:
        for one in (client.get("alerts") or {"alerts": []})["alerts"]:
            name = one["labels"]["alertname"]
            since = datetime.fromisoformat(one["activeAt"]).timestamp()
            if name in names and one["state"] == "firing" and since >= began:
                return Named(time.time() - began, f"{name}{f', for: {waits[name]}' * bool(waits[name])}")
        time.sleep(POLL_S)
    return Named()


def table(rows: list[Row]) -> str:
    lines = [
        "| problem | named as | what `why` said | page | alert | `phalanx why` |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        problem, alert = row.problem, row.alert
        rule = f" ({alert.words})" if alert.words else ""
        said = row.why.words or row.page.words
        lines.append(
            f"| {problem.name} | `{problem.code}` | {said} | {_seconds(row.page)} | {_seconds(alert)}{rule} | {_seconds(row.why)} |"
        )
    return "\n".join(lines)


def _seconds(named: Named) -> str:
    return "never" if named.seconds is None else f"{named.seconds:.1f} s"


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
            row = measure(problem)
        except TimeoutError as error:
            row = Row(problem, Named(), Named(), Named(None, str(error)))
        rows.append(row)
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if arguments.write:
        before, _, rest = arguments.write.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        arguments.write.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()

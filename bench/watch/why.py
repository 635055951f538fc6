"""Seconds from a problem that is planted in a real run until the page, an alert and ``phalanx why`` name it.

Each problem happens to a run of real processes on this machine. Meanwhile ``phalanx why --json`` is started again and again, the content of
its box is requested from a ``phalanx ui`` (``/api/run/ID/why``), and Debian's Prometheus scrapes the run's processes and ``phalanx ui`` every half second, with
the shipped rules. The clock
starts when the problem does: with the event of the step before a fault, or with the change on disk. Rules that wait for minutes are evaluated with windows
of ten seconds and without their ``for``, which is written beside the time.

    python -m bench.watch.why [NAME ...] [--write docs/evidence/watching.md]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.running import run_bench
from bench.watch.planted import PROBLEMS, Problem, Scene, signal_all
from deploy.prometheus_rules import alerts
from deploy.servers import Prometheus, prometheus
from deploy.test_real_prometheus import shortened
from free_ports import free_port
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Event, Step
from phalanx.run.directory.paths import RunDirectory

POLL_S = 0.2
PATIENCE_S = 90.0
BEGIN, END = "<!-- why: begin -->", "<!-- why: end -->"


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
    command: Named


def measure(problem: Problem) -> Row:
    """Plant the problem in a run, and poll all three until each has named it or patience ends."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder, port = Path(place), free_port(8)
        scene = problem.scene(folder, stack)
        (folder / "runs").mkdir(exist_ok=True)
        run = RunDirectory(folder / "runs" / "run")
        process = start(folder, scene, run, port)
        stack.callback(signal_all, process.pid, signal.SIGKILL)
        address = stack.enter_context(page(folder / "runs", folder / "page-cache"))
        client = stack.enter_context(
            prometheus(folder / "prometheus", f"{address}/targets", shorten=shortened, ui=address)
        )
        began = await_step(run, problem.from_step)
        if scene.plant is not None:
            await_none(lambda: of_page(address), problem)
            began = time.time()
            scene.plant(process.pid)
        with ThreadPoolExecutor(3) as pool:
            searches = (
                pool.submit(await_reason, lambda: of_page(address), problem, began),
                pool.submit(await_alert, client, problem, began),
                pool.submit(await_reason, lambda: of_command(run), problem, began),
            )
            return Row(problem, *(search.result() for search in searches))


def start(folder: Path, scene: Scene, run: RunDirectory, port: int) -> subprocess.Popen[bytes]:
    """Start the scene's run, with its metrics at ``port``."""
    file = folder / "run.toml"
    file.write_text(scene.text)
    if scene.agent:
        words = ["agent", "--run", str(file), "--set", f'run_dir="{run.path}"']
    else:
        words = ["train", str(file), "--run-dir", str(run.path)]
    words += ["--set", f"observe.metrics_port={port}", *scene.words]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **scene.environment},
        )
    # A bench whose child was killed and is not waited for ends (``bench.running``), and some plants kill the run.
    threading.Thread(target=process.wait, daemon=True).start()
    return process


@contextmanager
def page(folder: Path, cache: Path) -> Iterator[str]:
    """Start ``phalanx ui`` over a folder in a process of its own. Yields its address."""
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", "0", "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
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
    """Return the reasons in the page's box."""
    (run, *_) = fetch(f"{address}/api/runs")["runs"]
    reasons: list[dict[str, Any]] = fetch(f"{address}/api/run/{run['id']}/why")["reasons"]
    return reasons


def of_command(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the reasons of ``phalanx why --json``."""
    words = [sys.executable, "-m", "phalanx", "why", str(run.path), "--json"]
    reasons: list[dict[str, Any]] = json.loads(
        subprocess.run(words, capture_output=True, check=False).stdout
    )["reasons"]
    return reasons


def await_step(run: RunDirectory, step: int) -> float:
    """Wait until a step is done. Return its time."""

    def counts(event: Event) -> bool:
        return isinstance(event.body, Step) and event.body.step == step

    deadline = time.time() + 3 * PATIENCE_S
    while time.time() < deadline:
        try:
            if (event := newest_event(run.events, counts)) is not None:
                return event.t
        except EventLogError:
            pass
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was never done")


def names(problem: Problem, reason: dict[str, Any]) -> bool:
    """Return True if a reason is that of the problem, in its place."""
    return reason["code"] == problem.code and problem.where in reason["where"]


def await_reason(ask: Callable[[], list[dict[str, Any]]], problem: Problem, began: float) -> Named:
    while time.time() < began + PATIENCE_S:
        reason = next((reason for reason in ask() if names(problem, reason)), None)
        if reason is not None:
            return Named(time.time() - began, f"{reason['title']} ({reason['evidence'][0]})")
        time.sleep(POLL_S)
    return Named()


def await_none(ask: Callable[[], list[dict[str, Any]]], problem: Problem) -> None:
    """Wait until the reason is absent, as it may not be while a run starts on a busy machine. A later one then comes from the plant."""
    deadline = time.time() + PATIENCE_S
    while any(names(problem, reason) for reason in ask()):
        if time.time() > deadline:
            raise TimeoutError(f"{problem.code} is given before anything was planted")
        time.sleep(POLL_S)


def await_alert(client: Prometheus, problem: Problem, began: float) -> Named:
    """Return the first alert for the problem, by name or reason, that became active after it began; an earlier one has another cause."""
    waits = {str(rule["alert"]): str(rule.get("for", "")) for rule in alerts()}
    while time.time() < began + PATIENCE_S:
        for alert in (client.get("alerts") or {"alerts": []})["alerts"]:
            name = alert["labels"]["alertname"]
            since = datetime.fromisoformat(alert["activeAt"]).timestamp()
            meant = name in problem.alerts or alert["labels"].get("code") == problem.code
            if meant and alert["state"] == "firing" and since >= began:
                wait = f", for: {waits[name]}" * bool(waits[name])
                return Named(time.time() - began, f"{name}{wait}")
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
        words = row.command.words or row.page.words
        lines.append(
            f"| {problem.name} | `{problem.code}` | {words} | {_seconds(row.page)} | {_seconds(alert)}{rule} | {_seconds(row.command)} |"
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
    run_bench(main)

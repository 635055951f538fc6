"""What the page costs: the time to answer, the server's memory, and the step time of a run that many look at.

*Views*: 40 runs of 100,000 steps, written through the event log that runs write through, are served by ``phalanx ui`` in a process of its own; each
view is asked for twice, over HTTP: the first time after the server has started, when the run's file must be read, and again.
*Watchers*: a run on two ranks trains alone, and with 50 viewers that follow its events and fetch its curves, beside one viewer that never reads, by
turns. The ratio is that of the medians of step times, of pairs of runs next to each other.

    python bench/watch.py
    python bench/watch.py --views --runs 40 --steps 100000 --json
    python bench/watch.py --watchers --rounds 5
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Thread

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

STEP_S = 10.0
BEGAN_S = 1.79e9
RESTARTED_AT = 0.6
KINDS = ("parameters", "gradients", "optimizer", "activations", "other", "total")


def write_run(folder: Path, number: int, steps: int) -> None:
    """Writes the events of a run of ``steps`` steps of ten seconds with one recovery, evaluations and checkpoints."""
    folder.mkdir(parents=True)
    clock = [BEGAN_S + number]
    ledger = {
        **{"start.process": 30.0, "start.rendezvous": 20.0, "start.restore": 5.0, "start.warmup": 12.0},
        **{
            "step.compute": 0.0,
            "step.optimizer": 0.0,
            "step.comm_exposed.dp": 0.0,
            "step.comm_exposed.tp": 0.0,
        },
        **{
            "step.bubble": 0.0,
            "step.data_wait": 0.0,
            "step.host_gap": 0.0,
            "ckpt.blocking": 0.0,
            "eval": 0.0,
        },
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
    """Seconds until a view was there, the first time and the median of the next ones, and its size."""

    view: str
    first_s: float
    again_s: float
    kilobytes: float


@contextmanager
def page(folder: Path) -> Iterator[tuple[str, int]]:
    """``phalanx ui`` over a folder in a process of its own: its address and process number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", str(port), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())


def memory_mb(pid: int) -> float:
    """Resident memory of a process now, in megabytes."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return int(fields["VmRSS"].split()[0]) / 1e3


def timed(view: str, get: Callable[[], int], again: int = 5) -> Timing:
    began = time.perf_counter()
    size = get()
    first = time.perf_counter() - began
    times = []
    for _ in range(again):
        began = time.perf_counter()
        get()
        times.append(time.perf_counter() - began)
    return Timing(view, first, statistics.median(times), size / 1e3)


def views(folder: Path) -> dict[str, object]:
    """Times of all views of the runs in ``folder``, and the server's memory before, with one run and with all of them."""
    with page(folder) as (address, pid):
        found = [timed("/api/runs", lambda: len(fetch(f"{address}/api/runs")))]
        ids = [run["id"] for run in json.loads(fetch(f"{address}/api/runs"))["runs"]]
        memory = {"runs listed": memory_mb(pid)}

        def get(path: str, one: str) -> Callable[[], int]:
            return lambda: len(fetch(f"{address}/api/run/{one}{path}"))

        paths = (
            "/curves?names=all",
            "",
            "/curves?names=loss&x=time",
            "/curves?names=loss&first=54000&last=55000",
        )
        for path in (*paths, "/goodput?price_per_accelerator_hour=2", "/fleet", "/checkpoints"):
            found.append(timed(f"/api/run/ID{path}", get(path, ids[0])))
        memory["one run seen"] = memory_mb(pid)
        found.append(
            timed(
                "loss of every run", lambda: sum(get("/curves?names=loss&points=600", one)() for one in ids)
            )
        )
        memory["every run seen"] = memory_mb(pid)
    return {"timings": [vars(one) for one in found], "memory_mb": memory}

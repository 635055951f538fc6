"""Run directories of long runs for ``bench.watch.page``, written through the event log of real runs."""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import tomli_w

from phalanx.model.facts.presets import PRESETS
from phalanx.observe.event_log import EventLog
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
    """Write the events of a run of ``steps`` steps of ten seconds with one recovery, evaluations and checkpoints."""
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
    """Write the runs that are not in the folder yet, one on each core."""
    places = {number: folder / f"run-{number:02d}" for number in range(runs)}
    due = {number: place for number, place in places.items() if not place.exists()}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_run, due.values(), due, [steps] * len(due)))


def describe(folder: Path, number: int, steps: int) -> None:
    """Write the run file and the record of a run, as its start does."""
    settings = (
        f'name="run-{number}"',
        f"train.steps={steps}",
        f"runtime.seed={number}",
        'data.path="nowhere"',
    )
    spec = read_table({"model": {"preset": "llama3-8b"}}, PRESETS, settings, folder / "run.toml")
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

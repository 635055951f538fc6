"""Run directories for tests of lists and comparisons, written by the real writers and without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tomli_w

from observe.recorded import step
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Evaluated, Finished, RunStarted, Stopped
from phalanx.run.directory.paths import RunDirectory, RunResult
from phalanx.run.identity import identity
from phalanx.run.read import to_table
from phalanx.run.spec import OptimizerSpec, RunSpec, TrainSpec


def make_run(
    path: Path,
    steps: int = 6,
    *,
    of: int = 0,
    lr: float = 1e-3,
    ending: str = "finished",
    lineage: tuple[dict[str, object], ...] = (),
    losses: dict[int, float] | None = None,
    environment: dict[str, Any] | None = None,
    attempts: int = 1,
) -> RunDirectory:
    """A run of ``of`` steps (``steps`` if not given) that has logged ``steps``, over ``attempts``, and then ended as in ``ending``."""
    path.mkdir(parents=True)
    directory, total = RunDirectory(path), of or steps
    spec = RunSpec(
        name=path.name, run_dir=str(path), train=TrainSpec(steps=total), optimizer=OptimizerSpec(lr=lr)
    )
    directory.run_file.write_text(tomli_w.dumps(to_table(spec)))
    record = {
        "identity": identity(spec),
        "data_fingerprint": "da7a" * 16,
        "attempts": attempts,
        "lineage": list(lineage),
    }
    directory.record.write_text(json.dumps(record))
    for attempt in range(attempts):
        with EventLog(directory.events, attempt) as log:
            log.append(
                RunStarted(
                    path.name, total, ranks=2 + attempt, device="cpu", environment=dict(environment or {})
                )
            )
            first, last = attempt * steps // attempts, (attempt + 1) * steps // attempts
            for number in range(first + 1, last + 1):
                loss = (losses or {}).get(number, 4.0 - 0.1 * number)
                log.append(step(number, total, loss, lr=lr))
            if attempt == attempts - 1:
                _end(log, directory, last, ending)
    return directory


def _end(log: EventLog, directory: RunDirectory, step: int, ending: str) -> None:
    log.append(Evaluated(step, 3.5, 2.25))
    if ending == "finished":
        result = RunResult(
            run_dir=str(directory.path),
            step=step,
            loss=4.0 - 0.1 * step,
            held_out_loss=3.5,
            bits_per_byte=2.25,
            weights_sha256="ab" * 32,
        )
        log.append(Finished(dataclasses.asdict(result)))
        directory.write_result(result)
    elif ending == "stopped":
        log.append(Stopped(step, "stopped on request"))

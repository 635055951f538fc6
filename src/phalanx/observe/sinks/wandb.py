"""Weights & Biases: one W&B run a run, resumed by later attempts; the x-axis is the step, the config is the resolved run file and the record of
the newest start; where the time went is a table.

Offline unless WANDB_MODE says otherwise: files go to ``RUN_DIRECTORY/wandb`` and ``wandb sync`` uploads
them when nobody is waiting. (Online, W&B's own exit handler may wait for its upload.)
"""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

from phalanx.observe.events import EpochLeft, Event, Finished, Message, RunStarted
from phalanx.observe.sinks.base import (
    GOODPUT_COLUMNS,
    goodput_rows,
    hyperparameters,
    record,
    scalars,
    step_of,
)


class WandbSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        self._directory = run_directory
        wandb: Any = importlib.import_module("wandb")  # untyped: what it exports varies by version
        self._table: Any = wandb.Table
        # The same directory is the same W&B run, so that a restart goes on in it.
        identity = hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "phalanx"),
            name=run,
            id=identity,
            resume="allow",
            dir=str(run_directory),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True),
        )
        self._run.config.update(hyperparameters(run_directory), allow_val_change=True)
        # W&B drops a step lower than its last one, which a restart logs: the step is a metric of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, event: Event) -> None:
        values = scalars(event)
        if values:
            self._run.log({**values, "step": step_of(event)})
        rows = goodput_rows(event, self._directory)
        if rows:
            self._run.log(
                {"goodput": self._table(columns=list(GOODPUT_COLUMNS), data=[list(row) for row in rows])}
            )
            self._run.summary.update({f"goodput/{part}_s": seconds for part, seconds, _ in rows})
        match event.body:
            case RunStarted() as body:
                self._run.config.update(record(body, event.attempt), allow_val_change=True)
            case Finished(result=result):
                self._run.summary.update(result)
            case Message(level="warning" | "error", text=text) | EpochLeft(text=text):
                self._run.alert(title=text[:60], text=text)

    def close(self) -> None:
        self._run.finish()

"""Weights & Biases: one W&B run a run, resumed by later attempts; the x-axis is the step, the config is the resolved run file and the record of
the newest start; where the time went is a table.

Offline unless WANDB_MODE says otherwise: files go to ``RUN_DIRECTORY/wandb`` and ``wandb sync`` uploads
them when nobody is waiting. (Online, W&B's own exit handler may wait for its upload.) The files of the newest start have all points of the run; those
of earlier starts that were not uploaded are removed.
"""

import hashlib
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from phalanx.observe.events import EpochLeft, Event, Finished, Message, RunStarted
from phalanx.observe.sinks import (
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
        mode = os.environ.get("WANDB_MODE", "offline")
        offline = mode == "offline"
        identity = hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]
        if offline:
            _forget_earlier(run_directory / "wandb", identity)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "phalanx"),
            name=run,
            id=identity,
            resume="allow",
            dir=str(run_directory),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        self._run.config.update(hyperparameters(run_directory), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # Online W&B counts on where the server is; offline the file of this start has everything from the first step on.
        self._newest = -1 if offline else int(self._run.step) - 1

    def holds(self, event: Event) -> bool:
        step = step_of(event)
        return step is not None and step <= self._newest

    def write(self, event: Event) -> None:
        values = scalars(event)
        if values:
            # W&B's own step is the run's, so that rows which are uploaded twice are the same rows.
            self._run.log({**values, "step": step_of(event)}, step=step_of(event))
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


def _forget_earlier(folder: Path, identity: str) -> None:
    """Remove the offline files of earlier starts of this W&B run that were not uploaded."""
    for earlier in folder.glob(f"offline-run-*-{identity}"):
        if not any(earlier.glob("*.synced")):
            shutil.rmtree(earlier, ignore_errors=True)

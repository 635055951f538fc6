"""Trackio: one Trackio run a run, gone on with by later attempts; the config is the resolved run file and the record of the newest start; where the
time went is a table.

Trackio (https://github.com/gradio-app/trackio) has the interface of W&B over a local SQLite file. It goes to ``RUN_DIRECTORY/trackio``, unless
``TRACKIO_DIR`` names a folder for all runs, or ``TRACKIO_SERVER_URL`` or ``TRACKIO_SPACE_ID`` a server; look with
``TRACKIO_DIR=RUN_DIRECTORY/trackio trackio show``. A step that is done again after a restart is written again at its place.
"""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

from phalanx.observe.event_log import newest_event
from phalanx.observe.events import EpochLeft, Event, Finished, Message, RunStarted
from phalanx.observe.sinks import (
    GOODPUT_COLUMNS,
    goodput_rows,
    hyperparameters,
    record,
    scalars,
    step_of,
)

_RESENT_S = 600.0
_ELSEWHERE = ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")


class TrackioSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        own = run_directory.resolve()
        if not any(os.environ.get(name) for name in _ELSEWHERE):
            os.environ["TRACKIO_DIR"] = str(own / "trackio")  # read when trackio is imported
        elif os.environ.get("TRACKIO_DIR") != str(own / "trackio"):
            # There a run is known by its name alone: two run directories of one name are two runs.
            run = f"{run}-{hashlib.sha256(str(own).encode()).hexdigest()[:8]}"
        trackio: Any = importlib.import_module("trackio")
        self._directory, self._table, self._step = run_directory, trackio.Table, 0
        # What is written again has its place, so the points of the newest minutes are: a killed process may not have written them.
        events = run_directory / "events.jsonl"
        newest = newest_event(events, lambda _: True) if events.exists() else None
        self._resent_from = newest.t - _RESENT_S if newest else 0.0
        self._levels = {"warning": trackio.AlertLevel.WARN, "error": trackio.AlertLevel.ERROR}
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "phalanx"),
            name=run,
            resume="allow",
            config=dict(hyperparameters(run_directory)),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def holds(self, event: Event) -> bool:
        return event.t < self._resent_from

    def write(self, event: Event) -> None:
        self._step = step_of(event) or self._step
        values: dict[str, object] = {**scalars(event)}
        match event.body:
            case RunStarted() as body:
                self._run.config.update(record(body, event.attempt))
            case Finished(result=result):
                values |= {
                    f"result/{name}": value
                    for name, value in result.items()
                    if isinstance(value, int | float)
                }
            case Message(level="warning" | "error" as level, text=text):
                self._run.alert(title=text[:60], text=text, level=self._levels[level])
            case EpochLeft(text=text):
                self._run.alert(title=text[:60], text=text, level=self._levels["warning"])
        if rows := goodput_rows(event, self._directory):
            values["goodput"] = self._table(columns=list(GOODPUT_COLUMNS), data=[list(row) for row in rows])
        if values:
            self._run.log(values, step=self._step)

    def close(self) -> None:
        self._run.finish()

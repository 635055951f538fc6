"""The trackers that a run file may name, and the adapters of TensorBoard, Weights & Biases, Trackio and MLflow.

A tracker's package is imported when the tracker is opened. OpenTelemetry has a file of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.observe.event_log import newest_event
from phalanx.observe.events import EpochLeft, Event, Finished, Message, RunStarted, Stopped
from phalanx.observe.sink_registry import Vendor
from phalanx.observe.sinks import (
    GOODPUT_COLUMNS,
    Setting,
    Sink,
    goodput_rows,
    hyperparameters,
    kind_of_tag,
    point_of,
    record,
    scalars,
    step_of,
    texts,
)

# TensorBoard event files, written by tensorboardX: scalars by step, the resolved run file as hyperparameters, and as text the
# messages, the record of each start, the samples, and the time by ledger bucket.
#
# ``tensorboard --logdir RUN_DIRECTORY`` shows them. A start writes the points that a killed one has not written. A step that is
# repeated after a restart has the same value, and appears once.


class TensorBoardSink:
    def __init__(self, run_directory: Path, _run: str) -> None:
        """Write into the folder ``tensorboard`` of the run directory; first the run's settings, if they are known."""
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self._newest = newest_steps(run_directory / "tensorboard")
        self._writer = SummaryWriter(logdir=str(run_directory / "tensorboard"))
        self._step, self._directory = 0, run_directory
        self._tags: dict[str, str] = {}
        settings = hyperparameters(run_directory)
        if settings:
            # Not add_hparams, which would make a second, empty run of them.
            for summary in hparams(settings, dict.fromkeys(("train/loss", "eval/loss"), 0.0))[:2]:
                self._writer.file_writer.add_summary(summary)

    def holds(self, event: Event) -> bool:
        """Return True for a point of a step that its kind's newest file has reached."""
        point = point_of(event)
        return point is not None and point[1] <= self._newest.get(point[0], 0)

    def write(self, event: Event) -> None:
        """Write the numbers and texts of an event, and on a start, message or end also its record, text or account."""
        from tensorboardX.proto.summary_pb2 import Summary

        self._step = step_of(event) or self._step
        if numbers := scalars(event):
            # In one record: a record of each number takes five times the processor time of the rank that writes it.
            values = [Summary.Value(tag=self._tag(name), simple_value=x) for name, x in numbers.items()]
            self._writer.file_writer.add_summary(Summary(value=values), self._step, event.t)
        for name, text in texts(event).items():
            self._writer.add_text(name, f"```\n{text}\n```", self._step, walltime=event.t)
        rows = goodput_rows(event, self._directory)
        if rows:
            self._writer.add_text("goodput", _table(rows), self._step, walltime=event.t)
        match event.body:
            case RunStarted() as body:
                text = json.dumps(record(body, event.attempt), indent=1)
                self._writer.add_text("record", f"```\n{text}\n```", self._step, walltime=event.t)
            case Message(level=level, text=text):
                self._writer.add_text("messages", f"{level}: {text}", self._step, walltime=event.t)
            case EpochLeft(text=text):
                self._writer.add_text("messages", f"warning: {text}", self._step, walltime=event.t)

    def _tag(self, name: str) -> str:
        """Return the name in TensorBoard's character set, as tensorboardX writes it."""
        from tensorboardX.summary import scalar

        if name not in self._tags:
            self._tags[name] = scalar(name, 0.0).value[0].tag
        return self._tags[name]

    def close(self) -> None:
        self._writer.close()


def newest_steps(folder: Path) -> dict[str, int]:
    """Return the newest step of each kind of point in the event files of a folder.

    Reads the newest files first, until one has steps. A file that a killed writer left torn counts up to there. A
    file is a sequence of records: length (8 bytes), its checksum (4), the record, its checksum (4).
    """
    from tensorboardX.proto.event_pb2 import Event as EventRecord

    newest: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        with path.open("rb") as file:
            while len(header := file.read(12)) == 12:
                data = file.read(int.from_bytes(header[:8], "little"))
                if len(file.read(4)) < 4:
                    break
                record = EventRecord.FromString(data)
                for value in record.summary.value:
                    if kind := kind_of_tag(value.tag):
                        newest[kind] = max(newest.get(kind, 0), record.step)
        if "Step" in newest:
            break
    return newest


def _table(rows: list[tuple[str, float, float]]) -> str:
    """Return a table in Markdown, which TensorBoard renders."""
    lines = [f"| {' | '.join(GOODPUT_COLUMNS)} |", "|---|---:|---:|"]
    return "\n".join(
        [*lines, *(f"| {part} | {seconds:.3f} | {share:.2%} |" for part, seconds, share in rows)]
    )


# Weights & Biases: one W&B run per run, resumed by later attempts. The x-axis is the step, the config is the resolved run file
# and the record of the newest start, and the time by ledger bucket is a table.
#
# Offline unless WANDB_MODE is set otherwise: files go to ``RUN_DIRECTORY/wandb``, and ``wandb sync`` uploads them later.
# (Online, W&B's own exit handler may wait for its upload.) The files of the newest start have all points of the run. Files of
# earlier starts that were not uploaded are removed.


class WandbSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        """Open or resume the run in Weights & Biases, offline by default (``WANDB_MODE``), and set its config.

        The id is of the run directory. Offline, earlier folders of this run that were not synced are deleted, since
        all events are written again.
        """
        self._directory = run_directory
        wandb: Any = importlib.import_module("wandb")  # untyped: what it exports varies by version
        self._table: Any = wandb.Table
        # The same directory is the same W&B run, so that a restart continues it.
        mode = os.environ.get("WANDB_MODE", "offline")
        offline = mode == "offline"
        identity = hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]
        if offline:
            # The files of earlier starts that were not uploaded.
            for earlier in (run_directory / "wandb").glob(f"offline-run-*-{identity}"):
                if not any(earlier.glob("*.synced")):
                    shutil.rmtree(earlier, ignore_errors=True)
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
        # Online, W&B continues at the server's step; offline, the file of this start has all steps from the first.
        self._newest = -1 if offline else int(self._run.step) - 1

    def holds(self, event: Event) -> bool:
        """Return True for a step that the server has already; never offline."""
        step = step_of(event)
        return step is not None and step <= self._newest

    def write(self, event: Event) -> None:
        """Log the numbers and texts of an event; a start updates the config, an end adds the account.

        Warnings, errors and left epochs become alerts.
        """
        values = {**scalars(event), **texts(event)}
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


# Trackio: one Trackio run per run, continued by later attempts. The config is the resolved run file and the record of the
# newest start, and the time by ledger bucket is a table.
#
# Trackio (https://github.com/gradio-app/trackio) has the interface of W&B over a local SQLite file. The file is in
# ``RUN_DIRECTORY/trackio``, unless ``TRACKIO_DIR`` names a folder for all runs, or ``TRACKIO_SERVER_URL`` or
# ``TRACKIO_SPACE_ID`` a server. ``TRACKIO_DIR=RUN_DIRECTORY/trackio trackio show`` shows it. A step that is repeated after a
# restart is written again at its step.

_RESENT_S = 600.0
_ELSEWHERE = ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")


class TrackioSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        """Open or resume the run in Trackio, in the run directory unless the environment names another place.

        Elsewhere its name gets a suffix of the directory. Without such a variable, sets ``TRACKIO_DIR``.
        """
        own = run_directory.resolve()
        if not any(os.environ.get(name) for name in _ELSEWHERE):
            os.environ["TRACKIO_DIR"] = str(own / "trackio")  # read when trackio is imported
        elif os.environ.get("TRACKIO_DIR") != str(own / "trackio"):
            # There a run is identified by its name, so run directories with the same name need different ones.
            run = f"{run}-{hashlib.sha256(str(own).encode()).hexdigest()[:8]}"
        trackio: Any = importlib.import_module("trackio")
        self._directory, self._table, self._step = run_directory, trackio.Table, 0
        self._waiting: list[tuple[dict[str, object], int]] | None = []
        """Points of earlier starts with their steps, until the record of this start is in the config: Trackio keeps the config of the first point."""
        # A point may be written again at its step. So the points of the newest minutes are, because a killed process may not
        # have written them.
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
        """Return True for an event from before the time from which they are sent again."""
        return event.t < self._resent_from

    def write(self, event: Event) -> None:
        """Log the numbers and texts of an event. Points wait until the record of this start is in the config.

        Warnings, errors and left epochs become alerts at once.
        """
        self._step = step_of(event) or self._step
        values: dict[str, object] = {**scalars(event), **texts(event)}
        match event.body:
            case RunStarted() as body:
                self._run.config.update(record(body, event.attempt))
                self._log_waiting()
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
        if not values:
            return
        if self._waiting is None:
            self._run.log(values, step=self._step)
        else:
            self._waiting.append((values, self._step))

    def _log_waiting(self) -> None:
        """Log the waiting points, and make none wait from now on."""
        for values, step in self._waiting or ():
            self._run.log(values, step=step)
        self._waiting = None

    def close(self) -> None:
        self._log_waiting()
        self._run.finish()


# MLflow: scalars in batches by step, the resolved run file as parameters, the final result as tags, and its numbers as metrics
# for sorting. The record of each start, the samples and the time by ledger bucket are artifacts.
#
# One MLflow run per run: later attempts find it by a tag and continue it. A parameter cannot change in MLflow, so a field that
# differs in a later attempt, such as the number of ranks, becomes a tag with its name.
#
# Data goes to MLFLOW_TRACKING_URI, or else to a SQLite file in the run directory. A call takes tens of milliseconds, so steps
# are sent a hundred at a time. Unsent points are sent with the next ones. A server that does not answer gets a few attempts,
# instead of MLflow's default of several minutes.

BATCH = 900
"""Metrics per call; MLflow refuses more than 1000."""
PARAMETERS = 100
"""Parameters per call; MLflow refuses more."""
_TAG = "phalanx.run_directory"
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults for unset variables."""


class MlflowSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        """Open or create the run in MLflow, in the run directory by default, and log its parameters.

        Sets defaults of MLflow's variables, and reads which points it has already.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._directory = run_directory
        mlflow: Any = importlib.import_module("mlflow")
        entities: Any = importlib.import_module("mlflow.entities")
        self._metric, self._parameter = entities.Metric, entities.Param
        own = run_directory.resolve()
        configured_uri = os.environ.get("MLFLOW_TRACKING_URI")
        uri = configured_uri or f"sqlite:///{own / 'mlflow.db'}"
        # A server has a place for artifacts; without one MLflow would take the working directory.
        place = {} if configured_uri else {"artifact_location": (own / "mlartifacts").as_uri()}
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name("phalanx")
        experiment = (
            existing.experiment_id if existing else self._client.create_experiment("phalanx", **place)
        )
        self._run_id = self._find_or_create_run(experiment, run_directory.resolve(), run)
        self._set_parameters(hyperparameters(run_directory))
        self._metrics: list[Any] = []
        self._drawn = {
            (kind, metric.step)
            for tag in self._client.get_run(self._run_id).data.metrics
            if (kind := kind_of_tag(tag))
            for metric in self._client.get_metric_history(self._run_id, tag)
        }

    def holds(self, event: Event) -> bool:
        """Return True for a point that MLflow has already."""
        return point_of(event) in self._drawn

    def _find_or_create_run(self, experiment: str, directory: Path, run: str) -> str:
        """Return the id of the MLflow run of this run directory, set to running; create it if missing."""
        mark = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        earlier = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{mark}'", max_results=1)
        if earlier:
            run_id: str = earlier[0].info.run_id
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        new_id: str = self._client.create_run(experiment, run_name=run, tags={_TAG: mark}).info.run_id
        return new_id

    def _set_parameters(self, settings: Mapping[str, Setting]) -> None:
        """Log the parameters that are new. MLflow's parameters cannot change, so that a changed one becomes a tag."""
        logged = self._client.get_run(self._run_id).data.params
        new = [self._parameter(name, str(value)) for name, value in settings.items() if name not in logged]
        for first in range(0, len(new), PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + PARAMETERS])
        for name, value in settings.items():
            if logged.get(name, str(value)) != str(value):
                self._client.set_tag(self._run_id, name, str(value))

    def write(self, event: Event) -> None:
        """Queue the numbers of an event, which are sent in batches and at starts and ends; write its texts, record and account at
        once."""
        step = step_of(event)
        for tag, value in scalars(event).items():
            self._metrics.append(self._metric(tag, value, round(1000 * event.t), step))
        for tag, text in texts(event).items():
            self._client.log_text(self._run_id, text, f"{tag}/step-{step:09d}.txt")
        ends = isinstance(event.body, Finished | Stopped)
        if len(self._metrics) >= BATCH or ends or isinstance(event.body, RunStarted):
            self._flush()
        match event.body:
            case RunStarted() as body:
                kept = record(body, event.attempt)
                self._client.log_dict(self._run_id, kept, f"record/attempt-{event.attempt:03d}.json")
            case Finished(result=result):
                at_ms = round(1000 * event.t)
                for name, value in result.items():
                    self._client.set_tag(self._run_id, name, str(value))
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        self._metrics.append(self._metric(f"result/{name}", value, at_ms, 0))
        if rows := goodput_rows(event, self._directory):
            # The format of MLflow's own tables, which its page displays as a table.
            self._client.log_dict(self._run_id, {"columns": GOODPUT_COLUMNS, "data": rows}, "goodput.json")
            at_ms = round(1000 * event.t)
            self._metrics += [
                self._metric(f"goodput/{part}_s", seconds, at_ms, 0) for part, seconds, _ in rows
            ]
            self._flush()

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run_id)

    def _flush(self) -> None:
        """Send the queued numbers in batches of ``BATCH``."""
        while self._metrics:
            self._client.log_batch(self._run_id, metrics=self._metrics[:BATCH])
            del self._metrics[:BATCH]  # once they are there


def _open_otel(run_directory: Path, run: str) -> Sink:
    from phalanx_watch.sinks.otel import OtelSink

    return OtelSink(run_directory, run)


TENSORBOARD = Vendor("tensorboardX", TensorBoardSink, "tensorboard")
WANDB = Vendor("wandb", WandbSink)
MLFLOW = Vendor("mlflow", MlflowSink)
TRACKIO = Vendor("trackio", TrackioSink, "trackio")
OTEL = Vendor(
    "opentelemetry.exporter.otlp.proto.http", _open_otel, package="phalanx-train[otel]", resends=False
)

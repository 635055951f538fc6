"""MLflow: scalars in batches by step, the resolved run file as parameters, the final result as tags, and its numbers as metrics to sort by; the record of each start and where the time
went as artifacts.

One MLflow run a run: later attempts go on in it, found by a tag. A parameter cannot change in MLflow; a field that differs in a
later attempt, such as the number of ranks, becomes a tag of its name.

Goes to MLFLOW_TRACKING_URI, or else to a SQLite file in the run directory. MLflow takes tens of
milliseconds a call, so steps are gathered and sent a hundred at a time. What could not be sent is sent with what follows. A server that does not
answer is asked a few times and not, as MLflow has it, for minutes.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.observe.events import Event, Finished, RunStarted, Stopped
from phalanx.observe.sinks import (
    GOODPUT_COLUMNS,
    Setting,
    goodput_rows,
    hyperparameters,
    point_of,
    record,
    scalars,
    step_of,
)

BATCH = 900
"""Metrics a call; MLflow refuses more than 1000."""
PARAMETERS = 100
"""Parameters a call; MLflow refuses more."""
_TAG = "phalanx.run_directory"
_POINTS = {"Step": "train/loss", "Evaluated": "eval/loss"}
"""A metric that each event of a kind has."""
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""For those that the user has not set."""


class MlflowSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._directory = run_directory
        mlflow: Any = importlib.import_module("mlflow")
        entities: Any = importlib.import_module("mlflow.entities")
        self._metric, self._parameter = entities.Metric, entities.Param
        own = run_directory.resolve()
        given = os.environ.get("MLFLOW_TRACKING_URI")
        uri = given or f"sqlite:///{own / 'mlflow.db'}"
        # A server has a place for artifacts; without one MLflow would take the working directory.
        place = {} if given else {"artifact_location": (own / "mlartifacts").as_uri()}
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("phalanx")
        experiment = found.experiment_id if found else self._client.create_experiment("phalanx", **place)
        self._run_id = self._found_or_made(experiment, run_directory.resolve(), run)
        self._set_parameters(hyperparameters(run_directory))
        self._metrics: list[Any] = []
        self._drawn = {
            (kind, metric.step)
            for kind, tag in _POINTS.items()
            for metric in self._client.get_metric_history(self._run_id, tag)
        }

    def holds(self, event: Event) -> bool:
        return point_of(event) in self._drawn

    def _found_or_made(self, experiment: str, directory: Path, run: str) -> str:
        """The id of the MLflow run of this run directory."""
        mark = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        earlier = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{mark}'", max_results=1)
        if earlier:
            found: str = earlier[0].info.run_id
            self._client.update_run(found, status="RUNNING")
            return found
        made: str = self._client.create_run(experiment, run_name=run, tags={_TAG: mark}).info.run_id
        return made

    def _set_parameters(self, settings: Mapping[str, Setting]) -> None:
        known = self._client.get_run(self._run_id).data.params
        new = [self._parameter(name, str(value)) for name, value in settings.items() if name not in known]
        for first in range(0, len(new), PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + PARAMETERS])
        for name, value in settings.items():
            if known.get(name, str(value)) != str(value):
                self._client.set_tag(self._run_id, name, str(value))

    def write(self, event: Event) -> None:
        step = step_of(event)
        for tag, value in scalars(event).items():
            self._metrics.append(self._metric(tag, value, round(1000 * event.t), step))
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
            # As MLflow's own tables are written, which its page shows as one.
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
        while self._metrics:
            self._client.log_batch(self._run_id, metrics=self._metrics[:BATCH])
            del self._metrics[:BATCH]  # once they are there

"""MLflow: scalars in batches by step, the resolved run file as parameters, the final result as tags.

One MLflow run a run: later attempts go on in it, found by a tag. A parameter cannot change in MLflow; a field that differs in a
later attempt, such as the number of ranks, becomes a tag of its name.

Goes to MLFLOW_TRACKING_URI, or else to a SQLite file in the run directory. MLflow takes tens of
milliseconds a call, so steps are gathered and sent a hundred at a time.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.observe.events import Event, Finished, RunStarted
from phalanx.observe.sinks.base import Setting, hyperparameters, scalars, step_of

BATCH = 900
"""Metrics a call; MLflow refuses more than 1000."""
PARAMETERS = 100
"""Parameters a call; MLflow refuses more."""
_TAG = "phalanx.run_directory"


class MlflowSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        mlflow: Any = importlib.import_module("mlflow")
        entities: Any = importlib.import_module("mlflow.entities")
        self._metric, self._parameter = entities.Metric, entities.Param
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_directory.resolve() / 'mlflow.db'}")
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("phalanx")
        experiment = found.experiment_id if found else self._client.create_experiment("phalanx")
        self._run_id = self._found_or_made(experiment, run_directory.resolve(), run)
        self._set_parameters(hyperparameters(run_directory))
        self._metrics: list[Any] = []

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
        if len(self._metrics) >= BATCH or isinstance(event.body, RunStarted | Finished):
            self._flush()
        if isinstance(event.body, Finished):
            for name, value in event.body.result.items():
                self._client.set_tag(self._run_id, name, str(value))

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run_id)

    def _flush(self) -> None:
        batch, self._metrics = self._metrics, []
        for first in range(0, len(batch), BATCH):
            self._client.log_batch(self._run_id, metrics=batch[first : first + BATCH])

"""MLflow: scalars in batches by step, the final result as tags.

Goes to MLFLOW_TRACKING_URI, or else to a SQLite file in the run directory. MLflow takes tens of
milliseconds a call, so steps are gathered and sent a hundred at a time.
"""

import importlib
import os
from pathlib import Path
from typing import Any

from phalanx.observe.events import Event, Finished, RunStarted
from phalanx.observe.sinks.base import scalars, step_of

BATCH = 900
"""Metrics a call; MLflow refuses more than 1000."""


class MlflowSink:
    def __init__(self, run_directory: Path, run: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_directory.resolve() / 'mlflow.db'}")
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("phalanx")
        experiment = found.experiment_id if found else self._client.create_experiment("phalanx")
        self._run_id = self._client.create_run(experiment, run_name=run).info.run_id
        self._metrics: list[Any] = []

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

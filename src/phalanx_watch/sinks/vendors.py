"""The trackers that a run file may name, each imported only when it is opened."""

from __future__ import annotations

from pathlib import Path

from phalanx.observe.sink_registry import Vendor
from phalanx.observe.sinks import Sink


def _open_tensorboard(run_directory: Path, run: str) -> Sink:  # noqa: ARG001 (the folder names the run)
    from phalanx_watch.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_directory)


def _open_wandb(run_directory: Path, run: str) -> Sink:
    from phalanx_watch.sinks.wandb import WandbSink

    return WandbSink(run_directory, run)


def _open_mlflow(run_directory: Path, run: str) -> Sink:
    from phalanx_watch.sinks.mlflow import MlflowSink

    return MlflowSink(run_directory, run)


def _open_trackio(run_directory: Path, run: str) -> Sink:
    from phalanx_watch.sinks.trackio import TrackioSink

    return TrackioSink(run_directory, run)


def _open_otel(run_directory: Path, run: str) -> Sink:
    from phalanx_watch.sinks.otel import OtelSink

    return OtelSink(run_directory, run)


TENSORBOARD = Vendor("tensorboardX", _open_tensorboard, "tensorboard")
WANDB = Vendor("wandb", _open_wandb)
MLFLOW = Vendor("mlflow", _open_mlflow)
TRACKIO = Vendor("trackio", _open_trackio, "trackio")
OTEL = Vendor(
    "opentelemetry.exporter.otlp.proto.http", _open_otel, package="phalanx-train[otel]", resends=False
)

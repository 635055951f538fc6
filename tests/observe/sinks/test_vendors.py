"""The adapters, against the real packages where they are installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from observe.recorded import crashed_run
from phalanx.observe.events import Event, Message, Step
from phalanx.observe.sinks.background import close_sinks
from phalanx.observe.sinks.registry import open_sinks


def send(name: str, directory: Path, events: list[Event]) -> None:
    (sink,) = open_sinks([name], directory, "tiny")
    assert all(sink.offer(event) for event in events)
    (health,) = close_sinks([sink], 60)
    assert (health.last_error, health.written) == ("", len(events))


def with_run_file(directory: Path) -> Path:
    (directory / "run.toml").write_text('name = "tiny"\n[optimizer]\nlr = 0.1\n')
    return directory


def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = [*crashed_run(), Event(1.9e9, 1, Message("warning", "disk nearly full"))]
    send("tensorboard", tmp_path, events)
    read = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False)
    read.Reload()
    losses = [(event.body.step, event.body.loss) for event in events if isinstance(event.body, Step)]
    found = [(scalar.step, scalar.value) for scalar in read.Scalars("train/loss")]
    assert [at for at, _ in found] == [at for at, _ in losses]
    assert [value for _, value in found] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert len(read.Scalars("eval/bits_per_byte")) == 4
    assert any("messages" in tag for tag in read.Tags()["tensors"])


def test_tensorboard_has_the_run_file_as_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    send("tensorboard", with_run_file(tmp_path), crashed_run())
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    content = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    started = plugin.HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["optimizer.lr"].number_value == 0.1
    assert started.hparams["name"].string_value == "tiny"


@pytest.mark.slow
def test_wandb_offline_keeps_a_run_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    send_in_a_process("wandb", with_run_file(tmp_path))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"optimizer.lr" in file.read_bytes()


@pytest.mark.slow
def test_mlflow_keeps_a_run_in_its_file(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    send_in_a_process("mlflow", with_run_file(tmp_path))
    send_in_a_process("mlflow", tmp_path)  # sent again, as by `phalanx sinks fill`
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("phalanx").experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 45
    assert run.data.tags["weights_sha256"] == "ab" * 32
    assert run.data.params == {"name": "tiny", "optimizer.lr": "0.1"}


def send_in_a_process(name: str, directory: Path) -> None:
    """These two keep services and exit handlers of their own: they get a process of their own."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from observe.recorded import crashed_run; from observe.sinks.test_vendors import send\n"
        "send(sys.argv[2], Path(sys.argv[3]), crashed_run())\n"
    )
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}
    del environment["MLFLOW_TRACKING_URI"]
    done = subprocess.run(
        [sys.executable, "-c", code, tests, name, str(directory)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, json.dumps(done.stderr[-2000:])

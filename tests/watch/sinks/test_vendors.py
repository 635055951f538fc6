"""The adapters, against the real packages where they are installed (``make test-trackers``).

Each tracker gets the same recorded run, with a crash in it, and what it then holds is read back by its own reader.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from free_ports import free_port
from observe.recorded import crashed_run
from phalanx.observe.events import (
    Evaluated,
    Event,
    Finished,
    LayerStatistics,
    Message,
    RunStarted,
    Sampled,
    Step,
    encode,
)
from phalanx.observe.sink_registry import open_sinks
from phalanx.observe.sinks import close_sinks

COMMIT = "c0ffee" * 6
PATIENCE_S = 800
"""A busy machine takes minutes until MLflow is imported and has made its tables; nothing here is judged by its time."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip unless the modules are installed; the reason has the command that installs them."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"NOT TESTED: {', '.join(missing)} not installed; run make test-trackers"
    )


def recorded_run() -> list[Event]:
    """The recorded run. Each start has a record of its code, and the end has the ledger of its time.

    Two prompts are continued and the layers are measured at each evaluation.
    """
    events: list[Event] = []
    for event in crashed_run():
        body = event.body
        if isinstance(body, RunStarted):
            body = RunStarted(**{**vars(body), "environment": {"code": {"git_commit": COMMIT}}})
        if isinstance(body, Finished):
            body = Finished(body.result, {"start.process": 4.0, "step.compute": 20.0, "ckpt.blocking": 1.0})
        events.append(Event(event.t, event.attempt, body))
        if isinstance(body, Evaluated):
            of_layers = LayerStatistics(
                body.step, LAYERS, {name: values(body.step) for name, values in FIGURES.items()}
            )
            written = [
                Sampled(body.step, name, prompt, f" {body.step}\n{END}") for name, prompt in PROMPTS.items()
            ]
            events += [Event(event.t, event.attempt, measured) for measured in (of_layers, *written)]
    return events


PROMPTS = {"story": "Once upon a time", "code": "def add("}
END = 'the "end" → 100 % ü'
LAYERS = ["embedding", "0", "1"]
FIGURES: dict[str, Callable[[int], list[float | None]]] = {
    "residual.rms": lambda step: [0.5, 1.0 * step, math.inf if step == 30 else 2.0 * step],
    "attention.gradient_norm": lambda step: [None, 0.25, 0.125 * step],
}
"""The value of each of ``LAYERS`` in a step; one is not finite."""
MEASURED = (10, 20, 30, 40)


def texts_of(sample: str) -> dict[int, str]:
    """The prompt with its text in each step, as every tracker has it."""
    return {step: f"{PROMPTS[sample]} {step}\n{END}" for step in MEASURED}


def curves_of_layers() -> dict[str, dict[int, float]]:
    """The value in each step, by the tag that every tracker has."""
    tags: dict[str, dict[int, float]] = {}
    for figure, values in FIGURES.items():
        for step in MEASURED:
            for layer, value in zip(LAYERS, values(step), strict=True):
                if value is not None:
                    tags.setdefault(f"layer/{layer}/{figure.replace('.', '/')}", {})[step] = value
    return tags


def send(name: str, directory: Path, events: list[Event]) -> None:
    (sink,) = open_sinks([name], directory, "tiny")
    assert all(sink.offer(event) for event in events)
    (health,) = close_sinks([sink], PATIENCE_S)
    assert (health.last_error, health.written) == ("", len(events)), health


def run_directory(directory: Path) -> Path:
    """A run directory with a run file and the events of the recorded run."""
    (directory / "run.toml").write_text('name = "tiny"\n[optimizer]\nlr = 0.1\n')
    (directory / "events.jsonl").write_bytes(b"".join(map(encode, recorded_run())))
    return directory


def losses(events: list[Event]) -> list[tuple[int, float]]:
    """Step and loss of each step, once: what a restart computed again has the same value."""
    return list(
        {event.body.step: event.body.loss for event in events if isinstance(event.body, Step)}.items()
    )


# --- TensorBoard ----------------------------------------------------------------------------------


@needs("tensorboardX", "tensorboard")
def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = [*recorded_run(), Event(1.9e9, 1, Message("warning", "disk nearly full"))]
    send("tensorboard", run_directory(tmp_path), events)
    read = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False)
    read.Reload()
    curve = [(scalar.step, scalar.value) for scalar in read.Scalars("train/loss")]
    assert [at for at, _ in curve] == [at for at, _ in losses(events)]
    assert [value for _, value in curve] == pytest.approx([loss for _, loss in losses(events)], rel=1e-6)
    assert len(read.Scalars("eval/bits_per_byte")) == 4
    assert any("messages" in tag for tag in read.Tags()["tensors"])


@needs("tensorboardX", "tensorboard")
def test_tensorboard_shows_the_record_of_each_start_and_where_the_time_went(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send("tensorboard", run_directory(tmp_path), recorded_run())
    read = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False)
    read.Reload()
    texts = {
        tag.split("/")[0]: [event.tensor_proto.string_val[0].decode() for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    assert len(texts["record"]) == 2
    assert all(COMMIT in text for text in texts["record"])
    (table,) = texts["goodput"]
    assert "| ckpt.blocking |" in table


@needs("tensorboardX", "tensorboard")
def test_tensorboard_has_the_run_file_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    send("tensorboard", run_directory(tmp_path), recorded_run())
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    content = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    started = HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["optimizer.lr"].number_value == 0.1
    assert started.hparams["name"].string_value == "tiny"


@needs("tensorboardX", "tensorboard")
def test_tensorboard_reads_back_the_texts_of_samples_and_the_figures_of_layers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send("tensorboard", run_directory(tmp_path), recorded_run())
    read = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False)
    read.Reload()
    for sample in PROMPTS:
        tensors = read.Tensors(f"sample/{sample}/text_summary")
        texts = {event.step: event.tensor_proto.string_val[0].decode() for event in tensors}
        assert texts == {step: f"```\n{text}\n```" for step, text in texts_of(sample).items()}
    tags = [tag for tag in read.Tags()["scalars"] if tag.startswith("layer/")]
    curves = {tag: {scalar.step: scalar.value for scalar in read.Scalars(tag)} for tag in tags}
    assert curves == curves_of_layers()


# --- W&B ------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline_keeps_configuration_record_curves_and_goodput_on_disk(tmp_path: Path) -> None:
    send_in_a_process("wandb", run_directory(tmp_path))
    send_in_a_process("wandb", tmp_path)  # another start: its file has everything
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    for text in ("optimizer.lr", COMMIT, "train/loss", "eval/bits_per_byte", "goodput/ckpt.blocking_s"):
        assert text.encode() in content, text
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/goodput*.json")
    assert "ckpt.blocking" in [row[0] for row in json.loads(table.read_text())["data"]]
    rows = wandb_history(file)
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == dict(
        losses(recorded_run())
    )
    for tag, values in curves_of_layers().items():
        assert {row["step"]: float(row[tag]) for row in rows if tag in row} == values
    for sample in PROMPTS:
        assert {
            row["step"]: row[f"sample/{sample}"] for row in rows if f"sample/{sample}" in row
        } == texts_of(sample)


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows of an offline run. W&B 0.31 reads such a file in Go alone, so this reads it: a log of LevelDB with W&B's own messages.

    After 7 bytes come blocks of 32 KiB. A message is one piece, or several: checksum (4 bytes), length (2), and 1 (whole), 2 (first), 3 or 4 (last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, message = file.read_bytes(), 7, b""
    rows: list[dict[str, Any]] = []
    while at + 7 <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        length, piece = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if left < 7 or not piece:  # the rest of a block is filled up with zeros
            at += left
            continue
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if piece in (1, 4):
            items = Record.FromString(message).history.item
            rows += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}]
            message = b""
    return [row for row in rows if "step" in row]


BLOCK_BYTES = 1 << 15


# --- MLflow ---------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_keeps_a_run_in_its_file(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    send_in_a_process("mlflow", run_directory(tmp_path))
    send_in_a_process("mlflow", tmp_path)  # sent again, as by `phalanx sinks fill`
    require_whole(MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("mlflow")
def test_an_mlflow_server_that_is_killed_costs_the_run_nothing_and_has_everything_after_a_fill(
    tmp_path: Path,
) -> None:
    from mlflow import MlflowClient

    directory = tmp_path / "run"
    directory.mkdir()
    run_directory(directory)
    port = free_port()
    with mlflow_server(tmp_path, port) as server:
        send_in_a_process("mlflow", directory, f"http://127.0.0.1:{port}", first=20)
        end(server)
        done = in_a_process("mlflow", directory, f"http://127.0.0.1:{port}", offers=True)
        assert "could not be opened" in done.stdout, done.stderr[-2000:]
    with mlflow_server(tmp_path, port):
        done = phalanx(["sinks", "fill", str(directory), "--sink", "mlflow"], f"http://127.0.0.1:{port}")
        assert done.returncode == 0, done.stderr[-2000:]
        require_whole(MlflowClient(tracking_uri=f"http://127.0.0.1:{port}"))


def require_whole(client: object) -> None:
    """Everything of the recorded run is in MLflow, once."""
    runs = client.search_runs([client.get_experiment_by_name("phalanx").experiment_id])  # type: ignore[attr-defined]
    (run,) = runs

    def artifact(path: str) -> str:
        return Path(client.download_artifacts(run.info.run_id, path)).read_text(encoding="utf-8")  # type: ignore[attr-defined]

    history = client.get_metric_history(run.info.run_id, "train/loss")  # type: ignore[attr-defined]
    assert sorted((point.step, point.value) for point in history) == sorted(losses(recorded_run()))
    assert run.data.tags["weights_sha256"] == "ab" * 32
    assert run.data.params["optimizer.lr"] == "0.1"
    assert run.data.metrics["goodput/ckpt.blocking_s"] > 0
    listed = client.list_artifacts(run.info.run_id, "record")  # type: ignore[attr-defined]
    assert [file.path for file in listed] == ["record/attempt-000.json", "record/attempt-001.json"]
    assert "ckpt.blocking" in [row[0] for row in json.loads(artifact("goodput.json"))["data"]]
    for sample in PROMPTS:
        for step, text in texts_of(sample).items():
            assert artifact(f"sample/{sample}/step-{step:09d}.txt") == text
    for tag, values in curves_of_layers().items():
        history = client.get_metric_history(run.info.run_id, tag)  # type: ignore[attr-defined]
        # MLflow keeps what is infinite as the greatest number.
        assert {point.step: point.value for point in history} == {
            step: min(value, sys.float_info.max) for step, value in values.items()
        }


# --- Trackio --------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("trackio")
def test_trackio_keeps_configuration_record_curves_and_goodput(tmp_path: Path) -> None:
    send_in_a_process("trackio", run_directory(tmp_path))
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "(run,) = S.get_runs('phalanx')\n"
        "print(json.dumps([S.get_logs('phalanx', run), S.get_run_config('phalanx', run)], default=str))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    logs, config = json.loads(done.stdout.splitlines()[-1])
    assert [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log] == losses(recorded_run())
    assert len([log for log in logs if "eval/bits_per_byte" in log]) == 4
    assert config["optimizer.lr"] == 0.1
    assert config["environment"]["code"]["git_commit"] == COMMIT
    (table,) = [log["goodput"] for log in logs if "goodput" in log]
    assert "ckpt.blocking" in json.dumps(table)
    for tag, values in curves_of_layers().items():
        assert {log["step"]: float(log[tag]) for log in logs if tag in log} == values
    for sample in PROMPTS:
        assert {
            log["step"]: log[f"sample/{sample}"] for log in logs if f"sample/{sample}" in log
        } == texts_of(sample)


# --- processes of their own -----------------------------------------------------------------------

SEND = """
import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])
from watch.sinks.test_vendors import recorded_run, send
send(sys.argv[2], Path(sys.argv[3]), recorded_run()[:int(sys.argv[4]) or None])
"""
OFFER = """
import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])
from watch.sinks.test_vendors import PATIENCE_S, recorded_run
from phalanx.observe.sinks import close_sinks
from phalanx.observe.sink_registry import open_sinks
(sink,) = open_sinks([sys.argv[2]], Path(sys.argv[3]), "tiny")
for event in recorded_run(): sink.offer(event)
print(close_sinks([sink], PATIENCE_S))
"""


def send_in_a_process(name: str, directory: Path, uri: str = "", first: int = 0) -> None:
    """These keep services and exit handlers of their own: they get a process of their own."""
    done = in_a_process(name, directory, uri, first=first)
    assert done.returncode == 0, json.dumps(done.stderr[-2000:])


def in_a_process(
    name: str, directory: Path, uri: str = "", *, first: int = 0, offers: bool = False
) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", OFFER if offers else SEND, tests, name, str(directory), str(first)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment(uri),
    )


def phalanx(words: list[str], uri: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment(uri),
    )


def environment(uri: str = "") -> dict[str, str]:
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRACKIO_"))
    }
    variables |= {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    return variables | ({"MLFLOW_TRACKING_URI": uri} if uri else {})


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server of MLflow on an SQLite file, in one process."""
    words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, *words, *store],
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
        yield server
    finally:
        end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Kill a server with its workers."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"no answer from {url}: {log.read_text()[-2000:]}")

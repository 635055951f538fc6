"""A server that follows its run: newer weights take over in the middle of a text, and the answer names them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from click.testing import CliRunner

from checkpoint.saved_models import save_models
from phalanx.checkpoint.format.errors import StorageError
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import step_folder
from phalanx.run.spec import ModelSpec
from phalanx_serve.cli.serve_command import command
from phalanx_serve.engine.engine import Engine, KeptPages, Prepared
from phalanx_serve.http.app import Gateway, application
from phalanx_serve.http.worker import EngineWorker, Swap
from phalanx_serve.prompt import ModelText
from phalanx_serve.served import of_run
from phalanx_serve.served.of_run import CheckpointFollower, open_engine, weights_digest
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, ServeError
from serve.packed_runs import DENSE, make_run, random_model

SWAP_AT = 5


class Watched:
    """An engine whose run has a newer checkpoint after so many steps."""

    def __init__(self, engine: Engine, run_dir: Path, step: int) -> None:
        self._engine, self._run_dir, self._step, self._turn = engine, run_dir, step, 0
        self.follower: CheckpointFollower | None = None

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def pages(self) -> tuple[int, int]:
        return self._engine.pages()

    def drafts(self) -> tuple[int, int]:
        return self._engine.drafts()

    def step(self) -> Sequence[EngineOutput]:
        self._turn += 1
        if self._turn == SWAP_AT:
            save_models(self._run_dir / "checkpoints", {self._step: random_model(DENSE, self._step)})
            assert self.follower is not None
            self.follower.look()
        return self._engine.step()


def answers(run_dir: Path, body: dict[str, Any]) -> tuple[list[httpx.Response], list[str], bytes]:
    """The answers to a request during which a checkpoint comes, and to the same one afterwards; what was said, and the metrics."""
    served = ServedRun(str(run_dir), None, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    watched, said = Watched(opened.engine, run_dir, opened.step + 4), []
    worker = EngineWorker(watched, opened.identity, step=opened.step)
    watched.follower = CheckpointFollower(
        served, opened.engine, worker, opened.step, "recompute", said.append
    )
    tokenizer = BytesTokenizer()
    gateway = Gateway(ModelText("run", tokenizer, frozenset(), 64), worker)

    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            sent = {"model": "run", "prompt": [1, 2, 3], "max_tokens": 12, "seed": 1} | body
            return [await client.post("/v1/completions", json=sent) for _ in range(2)]

    try:
        return asyncio.run(asked()), said, gateway.counts.render(worker.load())
    finally:
        worker.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", DENSE, (1, 3))


def test_an_answer_names_the_weights_that_made_each_part_of_it(run_dir: Path) -> None:
    (during, after), said, metrics = answers(run_dir, {"return_token_ids": True})
    old, new = (weights_digest(random_model(DENSE, step)) for step in (3, 7))
    (choice,) = during.json()["choices"]
    assert choice["weights"] == [
        {"from_token": 0, "weights": old},
        {"from_token": SWAP_AT, "weights": new},
    ]
    assert len(choice["token_ids"]) == 12
    assert during.json()["system_fingerprint"].startswith(f"{new}:")
    assert "weights" not in after.json()["choices"][0]
    assert after.json()["system_fingerprint"] == during.json()["system_fingerprint"]
    assert said == [f"step 7 takes over (weights {new})"]
    assert b'phalanx_weights_step{model_name="run"} 7.0' in metrics
    assert b'phalanx_weights_swaps_total{model_name="run"} 1.0' in metrics


def test_each_event_of_a_stream_names_the_weights_of_its_token(run_dir: Path) -> None:
    (during, _), _, _ = answers(run_dir, {"stream": True})
    events = [json.loads(line[6:]) for line in during.text.split("\n\n") if line.startswith("data: {")]
    old, new = (weights_digest(random_model(DENSE, step)) for step in (3, 7))
    named = [event["system_fingerprint"].partition(":")[0] for event in events]
    assert named == sorted(named, key=[old, new].index)
    assert set(named) == {old, new}


def test_a_checkpoint_that_cannot_be_read_is_told_once_and_the_old_one_goes_on(run_dir: Path) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    for file in (run_dir / "checkpoints").rglob("*"):
        if "00000003" in str(file) and file.is_file() and file.suffix != ".json":
            file.write_bytes(file.read_bytes()[:-100])
    said: list[str] = []
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    follower = CheckpointFollower(served, opened.engine, worker, 1, "mixed", said.append)
    follower.look()
    follower.look()
    worker.close()
    (only,) = said
    assert only.startswith("step 3 cannot be read, and step 1 continues: ")
    assert follower.step == 1


def test_a_checkpoint_that_was_met_half_copied_takes_over_once_it_is_whole(run_dir: Path) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    folder = step_folder(run_dir / "checkpoints", 3)
    whole = {
        file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.suffix != ".json"
    }
    said: list[str] = []
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    follower = CheckpointFollower(served, opened.engine, worker, 1, "mixed", said.append)
    for missing_bytes in (200, 100, 0):
        for file, content in whole.items():
            file.write_bytes(content[: len(content) - missing_bytes])
        follower.look()
    worker.close()
    assert follower.step == 3
    assert said[-1].startswith("step 3 takes over")


@dataclasses.dataclass
class Failing:
    """An engine that cannot make weights ready, so many times."""

    engine: Engine
    error: Exception
    times: int

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def prepare(self, model: Transformer) -> Prepared:
        if self.times:
            self.times -= 1
            raise self.error
        return self.engine.prepare(model)

    def swap(self, prepared: Prepared, weights_id: str, *, pages: KeptPages) -> None:
        self.engine.swap(prepared, weights_id, pages=pages)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        StorageError("step-00000003: Input/output error"),
    ],
)
def test_a_step_that_cannot_be_read_at_present_is_tried_again_after_waits_that_double_and_told_once(
    run_dir: Path, error: Exception
) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    said: list[str] = []
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    failing = cast(Engine, Failing(opened.engine, error, 3))
    follower = CheckpointFollower(served, failing, worker, 1, "mixed", said.append)
    looks = 0
    while follower.step == 1 and looks < 100:
        follower.look()
        looks += 1
    worker.close()
    assert looks == 1 + 2 + 4 + 8
    failed, took_over = said
    assert failed.startswith("step 3 cannot be read, and step 1 continues: ")
    assert str(error).partition(":")[0] in failed
    assert failed.endswith("; it is tried again")
    assert took_over.startswith("step 3 takes over")


class OnGpu(Failing):
    """An engine on a GPU, as far as whoever follows can see."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


def test_a_gpu_without_memory_for_a_second_copy_of_the_weights_is_told_with_what_would_help_and_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    reads, read = [0], of_run.restored_model

    def reading(place: Path, step: int, *, device: torch.device, **options: Any) -> Any:
        assert device.type == "cuda"
        reads[0] += 1
        if reads[0] < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return read(place, step, **options)

    monkeypatch.setattr(of_run, "restored_model", reading)
    for name in ("make_current", "give_back_memory"):
        monkeypatch.setattr(f"phalanx_serve.numerics.{name}", lambda _: None)
    said: list[str] = []
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    engine = cast(Engine, OnGpu(opened.engine, RuntimeError(), 0))
    follower = CheckpointFollower(served, engine, worker, 1, "mixed", said.append)
    for _ in range(1 + 2 + 4):
        follower.look()
    worker.close()
    failed, took_over = said
    assert failed.startswith(
        "step 3 cannot take over, and step 1 continues: cuda:1 has no memory for a second copy of the weights, which --follow needs for a while "
        "(CUDA out of memory. Tried to allocate 2.00 GiB): keep fewer keys and values there (serve --memory)"
    )
    assert failed.endswith("; it is tried again")
    assert took_over.startswith("step 3 takes over")


def test_a_step_of_a_run_whose_file_cannot_be_read_at_present_is_tried_again(run_dir: Path) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    said: list[str] = []
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    follower = CheckpointFollower(served, opened.engine, worker, 1, "mixed", said.append)
    away = (run_dir / "run.toml").rename(run_dir / "elsewhere.toml")
    follower.look()
    away.rename(run_dir / "run.toml")
    for _ in range(2):
        follower.look()
    worker.close()
    failed, took_over = said
    assert "run.toml" in failed
    assert failed.endswith("; it is tried again")
    assert took_over.startswith("step 3 takes over")


def test_following_goes_on_after_any_failure_of_a_look(run_dir: Path) -> None:
    served = ServedRun(str(run_dir), 1, "float32", 64, 1 << 22, 64, "fast")
    opened = open_engine(served)
    assert isinstance(opened.engine, Engine)
    said: list[str] = []
    taken = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        if "takes over" in text:
            taken.set()
        elif len(said) == 1:
            away.rename(run_dir / "checkpoints")
            raise BrokenPipeError  # Whoever read what is told has left.

    away = (run_dir / "checkpoints").rename(run_dir / "elsewhere")
    worker = EngineWorker(opened.engine, opened.identity, step=1)
    CheckpointFollower(served, opened.engine, worker, 1, "mixed", tell, look_pause_s=0.001).start()
    try:
        assert taken.wait(100)
    finally:
        worker.close()
    assert (
        said[0] == f"newer steps cannot be looked for at present: {run_dir}/checkpoints is not there any more"
    )
    assert len(said) == 2


def test_weights_that_the_engine_refuses_leave_those_of_before_to_the_requests(run_dir: Path) -> None:
    opened = open_engine(ServedRun(str(run_dir), None, "float32", 64, 1 << 22, 64, "fast"))
    worker = EngineWorker(opened.engine, opened.identity, step=3)

    def refused() -> None:
        raise ServeError("the weights are of another model")

    async def last() -> EngineOutput:
        async with asyncio.timeout(100):
            return [one async for one in worker.submit(Request("r", (1, 2), 3))][-1]

    worker.swap(Swap(7, "other", refused))
    try:
        assert asyncio.run(last()) == Ended("r", "length")
        assert worker.trouble() == ""
        assert (worker.load().weights_step, worker.load().swaps) == (3, 0)
        assert worker.identity == opened.identity
    finally:
        worker.close()


def test_following_is_refused_where_other_processes_hold_the_weights(run_dir: Path) -> None:
    refused = CliRunner().invoke(command, [str(run_dir), "--follow", "mixed", "--workers", "2"])
    assert "leave out --workers" in refused.output

"""Real processes that share a model's layers: their text is that of one process, and it ends with an error or continues elsewhere if one is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from forked_python import children
from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from serve.workers.services import PATIENCE_S, Service, service, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
"""Each process opens a part of the model."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    # Parts of its matrices' outputs have the bits of the whole, as those of any model of a useful size; smaller ones have not.
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    save_llama3(folder / "llama3", shape)
    import_hf(folder / "llama3", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(run_dir: Path) -> list[Any]:
    with service(run_dir, "--context", "1000") as served:
        return as_dicts(list(ask(served)))


def ask(served: Service) -> Iterator[Any]:
    """The choices of a stream that is long enough to be computed still when its first tokens are read on a busy machine."""
    client = OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    stream = client.completions.create(
        model="run",
        prompt="the cat and the dog " * 20,
        max_tokens=500,
        seed=5,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for chunk in stream:
        yield chunk.choices[0]


def as_dicts(choices: list[Any]) -> list[Any]:
    return [choice.to_dict() for choice in choices]


def stages_of(pid: int) -> list[int]:
    """Return the processes of stages among the descendants of a process."""
    stages = []
    for child in children(pid):
        with suppress(OSError):  # a process that has ended since it was listed
            name = Path(f"/proc/{child}/cmdline").read_bytes()
            stages += [child] if b"stages.door" in name else stages_of(child)
    return stages


@pytest.mark.parametrize(
    ("divided", "whom", "sign", "reason"),
    [
        ("--pipeline", "stage 1", signal.SIGKILL, "too early|reset|ended"),
        ("--pipeline", "stage 1", signal.SIGSTOP, "no sign of life for 8 s"),
        ("--tensor", "share 1 of 2", signal.SIGKILL, "too early|reset|ended"),
        ("--tensor", "share 1 of 2", signal.SIGSTOP, "no sign of life for 8 s"),
    ],
)
def test_a_process_that_is_killed_or_stands_still_ends_its_texts_with_its_name_and_health_names_it(
    run_dir: Path, undisturbed: list[Any], divided: str, whom: str, sign: signal.Signals, reason: str
) -> None:
    with service(run_dir, "--context", "1000", divided, "2", "--stage-timeout", "8") as served:
        assert as_dicts(list(ask(served))) == undisturbed
        (stage,) = stages_of(served.process.pid)
        choices: list[Any] = []

        def disturbed() -> None:
            for choice in ask(served):
                choices.append(choice)
                if len(choices) == 20:
                    os.kill(stage, sign)

        with pytest.raises(openai.APIError, match=f"{whom} .*({reason})"):
            disturbed()
        assert as_dicts(choices) == undisturbed[: len(choices)]
        health = httpx.get(served.url.replace("/v1", "/health"), timeout=100)
        assert health.status_code == 503
        assert whom in health.json()["status"]
        with pytest.raises(openai.APIError, match=whom):  # later requests fail at once
            list(ask(served))


def test_a_stage_that_stands_still_without_requests_is_reported_by_health(run_dir: Path) -> None:
    with service(run_dir, "--context", "1000", "--pipeline", "2", "--stage-timeout", "8") as served:
        (stage,) = stages_of(served.process.pid)
        os.kill(stage, signal.SIGSTOP)
        health = until(
            lambda: (
                (response := httpx.get(served.url.replace("/v1", "/health"), timeout=100)).status_code == 503
                and response
            )
        )
        assert "no sign of life for 8 s (--stage-timeout)" in health.json()["status"]


def test_texts_of_a_worker_whose_stage_is_killed_go_on_elsewhere_to_the_bit(run_dir: Path) -> None:
    with service(
        run_dir, "--context", "1000", "--pipeline", "2", "--workers", "2", "--threads", "1"
    ) as served:
        until(served.all_ready)
        reference = as_dicts(list(ask(served)))
        ends = 0
        while not served.count("phalanx_requests_moved_total"):  # a text may be complete before the signal
            disturbed = []
            for number, choice in enumerate(ask(served)):
                disturbed.append(choice)
                if number == 20 and (worker := served.busy_process("both")) is not None:
                    (stage,) = stages_of(worker)
                    os.kill(stage, signal.SIGKILL)
                    ends += 1
            assert as_dicts(disturbed) == reference
            until(lambda ends=ends: served.count("phalanx_worker_ends_total") >= ends)
            until(served.all_ready)  # the worker and its stage were started again
        (stage,) = stages_of(served.pids[0])
        os.kill(stage, signal.SIGKILL)  # without a request
        until(lambda: served.count("phalanx_worker_ends_total") > ends)
        until(served.all_ready)
        assert as_dicts(list(ask(served))) == reference


@pytest.fixture(scope="module")
def by_one_thread(run_dir: Path) -> list[Any]:
    with service(run_dir, "--context", "1000", "--workers", "1", "--threads", "1") as served:
        return as_dicts(list(ask(served)))


@pytest.mark.parametrize(
    ("option", "degrees"),
    [("--tensor", "prefill:2,decode:1"), ("--tensor", "decode:2"), ("--pipeline", "prefill:2")],
)
def test_pages_of_workers_that_divide_the_model_otherwise_give_the_text_of_one_process(
    run_dir: Path, by_one_thread: list[Any], option: str, degrees: str
) -> None:
    workers = ("--workers", "prefill:1,decode:1", "--threads", "1")
    with service(run_dir, "--context", "1000", *workers, option, degrees) as served:
        until(served.all_ready)
        assert [len(stages_of(served.pids[number])) for number in range(2)] == (
            [0, 1] if degrees == "decode:2" else [1, 0]
        )
        assert as_dicts(list(ask(served))) == by_one_thread
        pulled = until(lambda: served.count("phalanx_pages_pulled_total"))
        assert served.count("phalanx_pages_shared_total") == pulled
        assert served.count("phalanx_pages_recomputed_total") == 0


def test_a_stage_joins_from_elsewhere_and_ends_with_the_server(
    run_dir: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    shared = ("--token-file", str(token))
    # It may be there before the server.
    command = [sys.executable, "-m", "phalanx", "serve", str(run_dir), "--join", at, *shared]
    stage = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with service(run_dir, "--context", "1000", "--pipeline", "2", "--stages-at", at, *shared) as served:
        assert as_dicts(list(ask(served))) == undisturbed
    assert "has ended" in stage.communicate(timeout=PATIENCE_S)[1]
    assert stage.returncode == 0

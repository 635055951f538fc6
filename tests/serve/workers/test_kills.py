"""Real worker processes that are killed at any time: the client's stream continues, and the text is the undisturbed one to the bit."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx_process import alive
from serve.workers.services import PATIENCE_S, Service, service, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
"""Three processes open a model each, and again after each kill."""

LONG = "the cat and the dog " * 60


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    save_llama3(folder / "llama3")
    import_hf(folder / "llama3", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def served(run_dir: Path) -> Iterator[Service]:
    with service(
        run_dir, "--workers", "prefill:1,decode:2", "--threads", "1", "--context", "1000"
    ) as running:
        yield running


@pytest.fixture
def ready(served: Service) -> Service:
    until(served.all_ready)
    return served


def ask(served: Service, seed: int, tokens: int = 300, prompt: str = LONG) -> Iterator[Any]:
    """The choices of a streamed answer, one after the other."""
    client = OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    stream = client.completions.create(
        model="run",
        prompt=prompt,
        max_tokens=tokens,
        seed=seed,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for chunk in stream:
        yield chunk.choices[0]


def as_dicts(choices: list[Any]) -> list[Any]:
    """All fields that a client received, choice by choice."""
    return [choice.to_dict() for choice in choices]


def test_prefill_and_decode_are_apart_and_pages_travel(ready: Service) -> None:
    before = ready.count("phalanx_pages_pulled_total")
    answer = list(ask(ready, seed=1, tokens=5))
    assert len(answer) >= 5
    until(lambda: ready.count("phalanx_pages_pulled_total") > before)  # sent with the worker's next heartbeat
    assert ready.count("phalanx_workers{") == 3


def strike_in_mid_text(ready: Service, sig: signal.Signals) -> int:
    """Signal a decode worker in the middle of a text, which must stay the same. Return the worker.

    A text may be complete before its worker gets the signal; then another one is disturbed, until one has moved.
    """
    moved, worker = ready.count("phalanx_requests_moved_total"), None
    for seed in itertools.count(100):
        until(ready.all_ready)
        undisturbed, disturbed = as_dicts(list(ask(ready, seed=seed))), []
        for number, choice in enumerate(ask(ready, seed=seed)):
            disturbed.append(choice)
            if number == 20 and (worker := ready.busy("decode")) is not None:
                ready.send(worker, sig)
        assert as_dicts(disturbed) == undisturbed
        if worker is not None and ready.count("phalanx_requests_moved_total") > moved:
            break
    assert worker is not None
    return worker


def test_a_decode_worker_is_killed_in_mid_text(ready: Service) -> None:
    strike_in_mid_text(ready, signal.SIGKILL)


def test_a_prefill_worker_is_killed_with_a_prompt_in_its_hands(ready: Service) -> None:
    undisturbed = as_dicts(list(ask(ready, seed=3, tokens=30)))
    ready.send(0, signal.SIGSTOP)  # it holds the prompt, and computes nothing
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: as_dicts(list(ask(ready, seed=3, tokens=30))))
        until(lambda: ready.busy("prefill") is not None or answer.done())
        ready.send(0, signal.SIGKILL)
        assert answer.result() == undisturbed


def test_the_source_of_pages_is_killed_before_they_are_pulled(ready: Service) -> None:
    prompt = "a dog and a cat " * 50  # no decode worker has its pages
    for worker in (1, 2):
        ready.send(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: as_dicts(list(ask(ready, seed=4, tokens=30, prompt=prompt))))
        until(lambda: ready.busy("decode") is not None or answer.done())
        ready.send(0, signal.SIGKILL)
        for worker in (1, 2):
            ready.send(worker, signal.SIGCONT)
        disturbed = answer.result()
    until(ready.all_ready)
    assert as_dicts(list(ask(ready, seed=4, tokens=30, prompt=prompt))) == disturbed


@pytest.mark.parametrize("victims", [(1, 2), (0, 1, 2)])
def test_several_workers_are_killed_at_once(ready: Service, victims: tuple[int, ...]) -> None:
    undisturbed = [as_dicts(list(ask(ready, seed=seed, tokens=200))) for seed in (5, 6, 7)]
    started = threading.Barrier(4)

    def disturbed(seed: int) -> list[Any]:
        choices = []
        for number, choice in enumerate(ask(ready, seed=seed, tokens=200)):
            choices.append(choice)
            if number == 10:
                started.wait()
        return as_dicts(choices)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(disturbed, seed) for seed in (5, 6, 7)]
        started.wait()
        for worker in victims:
            ready.send(worker, signal.SIGKILL)
        assert [answer.result() for answer in answers] == undisturbed


def test_a_worker_that_gets_sigterm_hands_its_texts_over(ready: Service) -> None:
    before = len(ready.lines)
    worker = strike_in_mid_text(ready, signal.SIGTERM)
    ends = until(
        lambda: [
            line["how"]
            for line in ready.lines[before:]
            if line["event"] == "worker-ended" and line["worker"] == worker
        ]
    )
    assert set(ends) == {"ended with code 0"}


def test_sigterm_finishes_what_goes_on_and_leaves_no_process(run_dir: Path) -> None:
    with service(run_dir, "--workers", "2", "--threads", "1", "--context", "1000") as served:
        stream = ask(served, seed=9, tokens=100)
        first = next(stream)
        served.process.send_signal(signal.SIGTERM)
        assert len([first, *stream]) >= 100
        assert served.process.wait(PATIENCE_S) == 0
        assert not any(map(alive, served.pids.values()))


def test_when_the_gateway_is_killed_clients_get_an_error_and_no_process_stays(run_dir: Path) -> None:
    with service(run_dir, "--workers", "2", "--threads", "1", "--context", "1000") as served:
        stream = ask(served, seed=9, tokens=900, prompt="the cat")
        next(stream)
        served.process.kill()
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            list(stream)
        until(lambda: not any(map(alive, served.pids.values())))


def test_a_model_that_no_worker_can_open_ends_the_service_with_the_reason(
    tmp_path: Path, run_dir: Path
) -> None:
    broken = tmp_path / "run"
    shutil.copytree(run_dir, broken, ignore=shutil.ignore_patterns("checkpoints"))
    with service(broken, "--workers", "2") as served:
        assert served.process.wait(PATIENCE_S) == 1
        assert served.process.stderr is not None
        assert "checkpoint" in served.process.stderr.read()


def test_workers_that_never_stay_are_given_up_aloud(run_dir: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    moved.symlink_to(run_dir)
    with service(moved, "--workers", "1", "--threads", "1") as served:
        real = tmp_path / "elsewhere"
        (run_dir / "checkpoints").rename(real)
        try:
            served.send(0, signal.SIGKILL)
            health = until(lambda: _trouble(served))
            assert "no worker is left" in health["status"]
            assert health["workers"][0]["state"] == "left"
            with pytest.raises(openai.APIError, match="no worker is left"):
                list(ask(served, seed=1, tokens=3, prompt="the cat"))
        finally:
            real.rename(run_dir / "checkpoints")


def _trouble(served: Service) -> Any:
    answer = httpx.get(served.url.replace("/v1", "/health"), timeout=100)
    return json.loads(answer.text) if answer.status_code == 503 else None

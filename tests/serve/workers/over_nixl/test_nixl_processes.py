"""A service whose workers take pages over NIXL: its texts are those of one worker, to the bit, and stay so when workers and agents are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from serve.workers.services import PATIENCE_S, Service, service, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        find_spec("nixl") is None,
        reason="NIXL is not installed: pip install --no-deps -r requirements/nixl.txt",
    ),
]
PROMPTS = [word * 60 for word in ("the cat and the dog ", "a dog and a cat ", "and the dog ")]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nixl")
    save_llama3(folder / "llama3")
    import_hf(folder / "llama3", folder / "run")
    return folder / "run"


def ask(served: Service, prompt: str, tokens: int = 30) -> list[Any]:
    """All choices of a streamed text, with all their fields."""
    client = OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    stream = client.completions.create(
        model="run",
        prompt=prompt,
        max_tokens=tokens,
        seed=1,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return [chunk.choices[0].to_dict() for chunk in stream]


@pytest.fixture(scope="module")
def by_one_worker(run_dir: Path) -> list[list[Any]]:
    with service(run_dir, "--context", "1000", "--workers", "1", "--threads", "1") as service_of_one:
        return [ask(service_of_one, prompt) for prompt in PROMPTS]


@pytest.fixture
def served(run_dir: Path) -> Iterator[Service]:
    options = ("--context", "1000", "--workers", "prefill:1,decode:1", "--threads", "1", "--pages", "nixl")
    with service(run_dir, *options) as running:
        until(running.all_ready)
        yield running


def agent_of(pid: int) -> int:
    """The process of a worker's agent."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if parent == pid and b"nixl_agent" in words:
                return int(entry)
    return 0


def test_pages_over_nixl_give_the_text_of_one_worker(served: Service, by_one_worker: list[list[Any]]) -> None:
    for prompt, right in zip(PROMPTS, by_one_worker, strict=True):
        assert ask(served, prompt) == right
    pulled = until(lambda: served.count("phalanx_pages_pulled_total"))
    assert served.count("phalanx_pages_over_nixl_total") == pulled >= len(PROMPTS)
    assert served.count("phalanx_pages_shared_total") == served.count("phalanx_pages_recomputed_total") == 0


def test_killed_agents_and_a_killed_source_change_no_token(
    served: Service, by_one_worker: list[list[Any]]
) -> None:
    for pid in served.pids.values():
        os.kill(agent_of(pid), signal.SIGKILL)
    assert ask(served, PROMPTS[0]) == by_one_worker[0]  # through the socket, or over agents that came back
    until(lambda: served.count("phalanx_pages_pulled_total"))
    until(lambda: all(map(agent_of, served.pids.values())))
    served.send(1, signal.SIGSTOP)
    agent = agent_of(served.pids[0])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, PROMPTS[1])
        until(lambda: served.busy("decode") is not None or answer.done())
        served.send(0, signal.SIGKILL)  # before its pages are read
        served.send(1, signal.SIGCONT)
        assert answer.result() == by_one_worker[1]
    until(lambda: not Path(f"/proc/{agent}").exists())
    until(served.all_ready)
    before = served.count("phalanx_pages_over_nixl_total")
    assert ask(served, PROMPTS[2]) == by_one_worker[2]
    until(lambda: served.count("phalanx_pages_over_nixl_total") > before)  # all agents are there again


def test_sigterm_leaves_no_agent(served: Service) -> None:
    agents = [agent_of(pid) for pid in served.pids.values()]
    assert all(agents)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    until(lambda: not any(Path(f"/proc/{agent}").exists() for agent in agents))

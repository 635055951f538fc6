"""The server around the interface: keys, signals, clients that leave, send nonsense or stay silent, and too many of them."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from openai import OpenAI

from phalanx.observe.record.notes import read_serving
from phalanx.run.directory.paths import RunDirectory
from phalanx_serve.cli.serve_command import command
from serve.http.served import server

pytestmark = pytest.mark.slow
"""Six servers are started, each of which loads a model."""

LONG: dict[str, Any] = {"model": "run", "prompt": "the cat", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(chat_run: Path) -> Iterator[str]:
    """A server that takes four texts at a time."""
    with server(chat_run, "--context", "1000", "--requests", "4") as (url, _):
        yield url


def running(url: str) -> float:
    text = httpx.get(url.replace("/v1", "/metrics"), timeout=100).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_"))


def until(condition: Any) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def raw(url: str) -> socket.socket:
    where = httpx.URL(url)
    sock = socket.create_connection((where.host, where.port or 80))
    sock.settimeout(100)
    return sock


def head(length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(own: str, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream}).encode()
    sock = raw(own)
    sock.sendall(head(len(body)) + body)
    until(lambda: running(own) > 0)
    sock.close()
    until(lambda: running(own) == 0)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", head(100), head(100) + b'{"model"', b"\0\xff\r\n\r\n"]
)
def test_a_client_that_leaves_in_the_middle_of_asking_harms_nobody(own: str, sent: bytes) -> None:
    with raw(own) as sock:
        sock.sendall(sent)
    assert httpx.get(own.replace("/v1", "/health"), timeout=100).status_code == 200


def test_too_many_are_sent_away_with_a_time_and_those_admitted_finish(own: str) -> None:
    statuses: list[int] = []
    waits: list[str] = []

    def ask() -> None:
        answer = httpx.post(f"{own}/completions", json=LONG | {"max_tokens": 200}, timeout=200)
        statuses.append(answer.status_code)
        waits.append(answer.headers.get("retry-after", ""))
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 200

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4
    assert all((status == 429) == bool(wait) for status, wait in zip(statuses, waits, strict=True))


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b"\xff\xfe", {"content-type": "application/json"}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b" " * (9 << 20), {"content-type": "application/json"}, 413),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    own: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = httpx.post(f"{own}/completions", content=content, headers=headers, timeout=100)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_at_sigterm_what_goes_on_is_finished_and_nothing_new_is_taken(chat_run: Path) -> None:
    with server(chat_run, "--context", "1000") as (url, process):
        client = OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model="run", prompt="the cat", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        until(lambda: [note.state for note in read_serving(RunDirectory(chat_run)) if note.url == url])
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(url.replace("/v1", "/ready"), timeout=100).status_code == 503)
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(model="run", prompt="a")
        assert error.value.status_code == 503
        assert list(stream)[-1].choices[0].finish_reason == "length"
        process.wait(100)
        assert url not in [note.url for note in read_serving(RunDirectory(chat_run))]


def test_a_second_signal_ends_at_once(chat_run: Path) -> None:
    with server(chat_run, "--context", "100000") as (url, process):
        client = OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model="run", prompt="the cat", max_tokens=90000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        process.send_signal(signal.SIGINT)
        until(lambda: httpx.get(url.replace("/v1", "/ready"), timeout=100).status_code == 503)
        process.send_signal(signal.SIGINT)
        process.wait(100)


def test_a_key_is_demanded_where_there_is_a_file_of_keys(chat_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = CliRunner().invoke(command, ["--new-key", str(file)]).output.strip()
    assert key not in file.read_text()
    with server(chat_run, "--key-file", str(file)) as (url, _):
        assert OpenAI(base_url=url, api_key=key).models.list().data
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=url, api_key=key[:-1]).models.list()
        assert httpx.get(f"{url}/models", timeout=100).status_code == 401
        assert httpx.get(url.replace("/v1", "/health"), timeout=100).status_code == 200


def test_what_would_be_open_to_others_does_not_start(chat_run: Path, tmp_path: Path) -> None:
    open_to_all = CliRunner().invoke(command, [str(chat_run), "--host", "0.0.0.0"])
    assert "--key-file" in open_to_all.output
    file = tmp_path / "keys"
    CliRunner().invoke(command, ["--new-key", str(file)])
    file.chmod(0o644)
    readable = CliRunner().invoke(command, [str(chat_run), "--key-file", str(file)])
    assert "chmod 600" in readable.output


def test_a_port_that_is_taken_is_named(own: str, chat_run: Path) -> None:
    port = httpx.URL(own).port
    refused = CliRunner().invoke(command, [str(chat_run), "--port", str(port)])
    assert refused.exit_code == 1
    assert f"port {port}" in refused.output

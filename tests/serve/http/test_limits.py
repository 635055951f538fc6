"""Limits over HTTP: what does not fit into pages, and keys that ask for more than they may, by the application itself."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from phalanx.data.chat.template import ChatTemplate
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, train_bpe
from phalanx.run.peers import loopback_names
from phalanx_serve.cli.serve_command import command
from phalanx_serve.http.admission import add_key, parse_limits, read_keys
from phalanx_serve.http.app import Gateway, application
from phalanx_serve.http.worker import WorkerLoad
from phalanx_serve.prompt import ModelText
from phalanx_serve.traffic.events import EngineOutput, Request
from serve.http.ports import Immediate


def gateway(keys: Path | None = None, text: ModelText | None = None) -> Gateway:
    tokenizer = BytesTokenizer()
    text = text or ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size)
    return Gateway(text, Immediate(), None if keys is None else read_keys(keys))


def ask(
    server: Gateway, *bodies: dict[str, Any], key: str = "", path: str = "completions"
) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(server))
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://run", headers=headers) as client:
            return [await client.post(f"/v1/{path}", json={"model": "run"} | body) for body in bodies]

    return asyncio.run(all_of_them())


def test_health_names_numerics_and_the_origin_of_the_bits_and_models_the_weights_too() -> None:
    async def told() -> tuple[Any, Any]:
        transport = httpx.ASGITransport(application(gateway()))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return (await client.get("/health")).json(), (await client.get("/v1/models")).json()["data"][0]

    health, model = asyncio.run(told())
    assert health == {"status": "ok", "numerics_id": "numerics", "bits": "trainer"}
    assert (model["weights_sha"], model["numerics_id"], model["bits"]) == ("weights", "numerics", "trainer")


def test_a_path_or_a_method_that_is_not_there_is_refused_with_those_that_are() -> None:
    async def asked() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(application(gateway()))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.post("/completions", json={}), await client.get("/v1/completions")

    path, method = asyncio.run(asked())
    assert (path.status_code, method.status_code, method.headers["allow"]) == (404, 405, "POST")
    assert "no path /completions: this server has /v1/models, " in path.json()["error"]["message"]
    assert method.json()["error"]["message"] == "/v1/completions does not take GET: it takes POST"


def test_two_limits_of_a_chats_tokens_that_differ_are_refused() -> None:
    tokenizer = train_bpe(["a text"], vocab_size=257)
    template = ChatTemplate("{{ messages[0].content }}", {})
    server = gateway(text=ModelText("run", tokenizer, frozenset(), 257, template))
    chat = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 1}
    differ, equal = ask(server, chat | {"max_tokens": 2}, chat | {"max_tokens": 1}, path="chat/completions")
    assert (differ.status_code, equal.status_code) == (400, 200)
    assert differ.json()["error"]["param"] == "max_completion_tokens"


def test_a_compressed_body_is_refused_with_the_remedy_and_identity_is_taken() -> None:
    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(gateway()))
        body = b'{"model": "run", "prompt": "a", "max_tokens": 1}'
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return [
                await client.post(
                    "/v1/completions",
                    content=content,
                    headers={"Content-Type": "application/json", "Content-Encoding": encoding},
                )
                for encoding, content in (("gzip", gzip.compress(body)), ("identity", body))
            ]

    packed, plain = asyncio.run(asked())
    assert (packed.status_code, plain.status_code) == (415, 200)
    assert "'gzip', which is not unpacked here: send it as it is" in packed.json()["error"]["message"]


def test_a_text_with_a_token_that_the_model_does_not_have_is_refused_as_the_tokenizers_fault() -> None:
    tokenizer = train_bpe(["a text"], vocab_size=257)
    known, unknown = "a", "z"
    vocab = tokenizer.encode(unknown)[0]
    text = ModelText("run", tokenizer, frozenset(), vocab, ChatTemplate("{{ messages[0].content }}", {}))
    server, by_id = gateway(text=text), {"prompt": [vocab], "max_tokens": 1}
    answers = [
        *ask(server, *({"prompt": one, "max_tokens": 1} for one in (known, unknown)), by_id),
        *ask(
            server,
            *({"messages": [{"role": "user", "content": one}], "max_tokens": 1} for one in (known, unknown)),
            path="chat/completions",
        ),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 200, 400]
    for answer, name in ((answers[1], "prompt"), (answers[2], "prompt"), (answers[4], "messages")):
        error = answer.json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name}: token id {vocab} is outside the vocabulary of {vocab}; ")
        assert f"the tokenizer has 257 tokens and the model {vocab}" in error["message"]
    assert ModelText("run", tokenizer, frozenset(), 257).note == ""


def test_a_text_that_all_pages_do_not_hold_is_refused_with_the_numbers() -> None:
    fits, too_long = ask(
        gateway(), {"prompt": "a" * 28, "max_tokens": 100}, {"prompt": "a" * 29, "max_tokens": 100}
    )
    assert fits.status_code == 200
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "3 pages of 64 tokens, and this server has 2" in error["message"]
    assert "--memory" in error["message"]


def test_a_key_beyond_its_limit_is_told_which_and_when_and_metrics_name_it_without_telling_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice", parse_limits("requests=3,tokens=60"))
    server, begin_s = gateway(file), time.monotonic()
    small: dict[str, Any] = {"prompt": "aaaa", "max_tokens": 6}
    (unknown,), (none,) = (ask(server, small, key=one) for one in ("sk-other", ""))
    assert [unknown.status_code, none.status_code] == [401, 401]
    assert "the key that was sent is none of this server's" in unknown.json()["error"]["message"]
    assert "a key is needed" in none.json()["error"]["message"]
    first, never, second, third = ask(server, small, {"prompt": "a", "max_tokens": 90}, small, small, key=key)
    assert [first.status_code, second.status_code] == [200, 200]
    assert never.json()["error"]["code"] == "request_exceeds_rate_limit"
    assert third.status_code == 429
    assert "'alice' has 3 requests in a minute" in third.json()["error"]["message"]
    # A request in 20 s, of which some have passed.
    assert 20 - (time.monotonic() - begin_s) <= int(third.headers["retry-after"]) <= 20
    metrics = server.counts.render(WorkerLoad()).decode()
    assert 'phalanx_key_requests_total{key="alice"} 3.0' in metrics
    assert 'phalanx_key_tokens_total{key="alice",kind="generated"} 12.0' in metrics
    assert 'phalanx_key_limited_total{key="alice",limit="requests"} 1.0' in metrics
    assert key not in metrics


def test_a_text_that_no_tokens_could_make_fit_is_refused_by_its_length_and_taken_from_its_keys_limit(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice", parse_limits("requests=1"))
    too_long, small = ask(gateway(file), {"prompt": "a" * 129, "max_tokens": 1}, {"prompt": "a"}, key=key)
    error = too_long.json()["error"]
    assert (too_long.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "129 bytes does not fit into the context: 128 tokens have at most 128 bytes" in error["message"]
    assert "'alice' has 1 requests in a minute" in small.json()["error"]["message"]


def test_a_request_that_was_refused_frees_its_place_among_those_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice", parse_limits("concurrent=1"))
    wrong, right = ask(gateway(file), {"prompt": "a", "top_p": 0}, {"prompt": "a"}, key=key)
    assert (wrong.status_code, right.status_code) == (400, 200)


class FaultyOnce(Immediate):
    """A port that fails in its first request with an error that nothing expects."""

    def __init__(self) -> None:
        self.failures = 0

    async def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        if not self.failures:
            self.failures += 1
            raise RuntimeError("a defect")
        async for output in super().submit(request):
            yield output


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_by_a_defect_leaves_no_load_and_frees_its_place_among_those_of_its_key(
    tmp_path: Path, stream: bool
) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice", parse_limits("concurrent=1"))
    server = replace(gateway(file), port=FaultyOnce())

    async def both() -> list[int]:
        transport = httpx.ASGITransport(application(server), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://run", headers=headers) as client:
            body = {"model": "run", "prompt": "a"}
            failed = await client.post("/v1/completions", json=body | {"stream": stream})
            assert server.unfinished == 0
            return [failed.status_code, (await client.post("/v1/completions", json=body)).status_code]

    # The status of a stream is sent before its first event.
    assert asyncio.run(both()) == [200 if stream else 500, 200]


@dataclass(frozen=True)
class SlowTokenizer(BytesTokenizer):
    """Encodes a text once ``answered`` is set."""

    answered: threading.Event = field(default_factory=threading.Event, compare=False)

    def encode(self, text: str) -> list[int]:
        assert self.answered.wait(60), "the event loop waits for a text to be tokenized"
        return super().encode(text)


def test_a_text_that_takes_long_to_tokenize_holds_up_no_other_request() -> None:
    tokenizer = SlowTokenizer()
    server = gateway(text=ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size))

    async def both() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(application(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://run", timeout=None) as client:
            body = {"model": "run", "prompt": "a", "max_tokens": 1}
            slow = asyncio.create_task(client.post("/v1/completions", json=body))
            health = await client.get("/health")
            tokenizer.answered.set()
            return await slow, health

    slow, health = asyncio.run(both())
    assert (slow.status_code, health.status_code) == (200, 200)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics"])
def test_a_server_without_keys_answers_its_own_names_alone(path: str) -> None:
    server = gateway()
    server.hosts = loopback_names("127.0.0.2")

    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            hosts = (
                "localhost:8000",
                "127.0.0.2:8000",
                "[::1]:8000",
                "evil.example",
                "127.0.0.1.evil.example:8000",
            )
            return [await client.get(path, headers={"Host": host}) for host in hosts]

    answers = asyncio.run(asked())
    assert [answer.status_code for answer in answers] == [200, 200, 200, 421, 421]
    assert "--key-file" in answers[-1].json()["error"]["message"]


@pytest.mark.parametrize(
    ("target", "status"), [(b"http://localhost/v1/models", 200), (b"http://evil.example/v1/models", 421)]
)
def test_a_target_that_is_a_url_is_answered_by_its_path_and_judged_by_its_host(
    target: bytes, status: int
) -> None:
    server = gateway()
    server.hosts = loopback_names("127.0.0.1")
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "query_string": b"",
        "path": target.decode(),
        "raw_path": target,
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", 8000),
        "asgi": {"version": "3.0"},
    }
    asyncio.run(application(server)(scope, receive, send))
    assert statuses == [status]


def test_a_file_that_is_no_pack_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    pack = tmp_path / "step.pack"
    pack.write_bytes(b"pack")
    refused = CliRunner().invoke(command, [str(pack), "--port", "0"])
    assert refused.exit_code == 1
    assert "is not a pack; give a file that `phalanx pack` has written" in " ".join(refused.output.split())

"""Clients that storm a gateway, for locust (docs.locust.io): whole answers, streams, chats, wrong requests, and clients that hang up.

    locust -f bench/load/locustfile.py --headless --users 64 --spawn-rate 16 --run-time 60s --host http://localhost:8000

A request that is sent away because there is too much to do (429, with a ``Retry-After``) is no failure: its client waits as told. A stream
that ends without ``[DONE]``, an answer without the tokens that it counts, or an unexpected status is one.
"""

from __future__ import annotations

import random
import time

from locust import HttpUser, constant, events, task
from locust.clients import ResponseContextManager

PROMPTS = ("the cat sat on", "a dog", "the mat and the hat", "")


class Client(HttpUser):
    """One client, who asks again as soon as an answer has come."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Learns the model's name, as every client of OpenAI's interface does."""
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def ask(self, path: str, fields: dict[str, object], name: str, *, expected: int = 200) -> None:
        """Asks and judges the answer."""
        body = {"model": self.model, "max_tokens": random.randint(1, 24), "ignore_eos": True} | fields
        stream = bool(body.get("stream"))
        with self.client.post(path, json=body, name=name, catch_response=True, stream=stream) as answer:
            if answer.status_code == 429:
                self.wait_as_told(answer)
            elif answer.status_code != expected:
                answer.failure(f"status {answer.status_code}: {answer.text}")
            elif expected != 200:
                answer.success()
            elif stream:
                self.read_stream(answer)
            elif answer.json()["usage"]["completion_tokens"] < 1:
                answer.failure("an answer without tokens")

    def wait_as_told(self, answer: ResponseContextManager) -> None:
        """Counts a refusal as what it is, and waits."""
        after = answer.headers.get("retry-after")
        if after is None or not after.isdigit():
            answer.failure("429 without Retry-After")
            return
        answer.success()
        events.request.fire(
            request_type="429",
            name="sent away",
            response_time=int(after) * 1000,
            response_length=0,
            exception=None,
            context={},
        )
        time.sleep(min(int(after), 5))

    def read_stream(self, answer: ResponseContextManager) -> None:
        """Reads a stream to its end, and its time to the first event."""
        begun, first, last = time.perf_counter(), True, b""
        for line in answer.iter_lines():
            if not line:
                continue
            if first:
                events.request.fire(
                    request_type="TTFT",
                    name="stream",
                    response_time=(time.perf_counter() - begun) * 1000,
                    response_length=0,
                    exception=None,
                    context={},
                )
                first = False
            last = line
        if last.strip() != b"data: [DONE]":
            answer.failure(f"a stream that ended with {last[:100]!r}")

    @task(6)
    def whole(self) -> None:
        """A whole answer."""
        self.ask("/v1/completions", {"prompt": random.choice(PROMPTS)}, "whole")

    @task(6)
    def stream(self) -> None:
        """A stream with usage."""
        fields = {"prompt": random.choice(PROMPTS), "stream": True, "stream_options": {"include_usage": True}}
        self.ask("/v1/completions", fields, "stream")

    @task(3)
    def chat(self) -> None:
        """A chat in pieces."""
        messages = [{"role": "user", "content": random.choice(PROMPTS)}]
        self.ask("/v1/chat/completions", {"messages": messages, "stream": True}, "chat")

    @task(2)
    def wrong(self) -> None:
        """A request that must be refused."""
        self.ask("/v1/completions", {"prompt": "a", "temperature": -1}, "wrong", expected=400)

    @task(2)
    def hang_up(self) -> None:
        """A client that leaves in the middle of its stream."""
        body = {"model": self.model, "prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with self.client.post(
            "/v1/completions", json=body, name="hang up", catch_response=True, stream=True
        ) as answer:
            if answer.status_code == 429:
                self.wait_as_told(answer)
                return
            if answer.status_code == 200:
                next(iter(answer.iter_lines()), None)
            answer.success()
            answer.close()

    @task(1)
    def health(self) -> None:
        """What a balancer asks."""
        for path in ("/health", "/ready", "/metrics"):
            self.client.get(path)

"""Streamed requests to a service of real processes while faults strike it, each answer compared by bits.

    python -m bench.serve.survives --requests 10000 --faults 1000 --seed 0

A tiny model with random weights (or that of RUN_DIR) answers a pool of distinct requests, prompts of 1 to 300 tokens some of which share a beginning, from one undisturbed process. Then
``phalanx serve --workers prefill:1,decode:3`` answers requests drawn from the pool, many at a time, while faults drawn from the seed strike (``bench.serve.faults``): workers and the gateway are killed, stop, hand over; their
connections, transfers of pages and clients' connections are cut; clients hang up. A client whose connection ends sends the same request again. Of each
attempt, also of one that ends in the middle, every token, its log-probability and those of the likeliest others, and the text are compared with the undisturbed answer: a token that is missing at an answer's end is *lost*, a repeated
one is *doubled*, a different one is *changed*. At the end no text may be running and no page in use. Pages are few (``--memory``), so that texts are preempted and prefixes evicted. Requests wait for the faults that are due before them.
Ctrl-C prints the results so far. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.running import run_bench
from bench.serve.faults import Fault, Service, drawn

_VOCABULARY, _CONTEXT = 256, 512
_PATIENCE_S = 3600.0
_AHEAD = 3
"""Faults that may be due before requests wait for them."""

ReceivedToken = tuple[Any, ...]
"""A token as its client received it: id, log-probability, the likeliest others."""


@dataclass
class StreamedAnswer:
    """The tokens, text and end of one streamed answer, as far as they have arrived."""

    tokens: list[ReceivedToken] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    made_by: set[str] = field(default_factory=set)
    done: bool = False
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Add an event of the stream."""
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.made_by.add(event["system_fingerprint"])
        choice = event["choices"][0]
        ids = choice["token_ids"] or []
        probable = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        others = probable["top_logprobs"] or [None] * len(ids)
        self.tokens += [
            (token, logprob, json.dumps(top))
            for token, logprob, top in zip(ids, probable["token_logprobs"], others, strict=True)
        ]
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish


def judged(expected: StreamedAnswer, answer: StreamedAnswer) -> str:
    """Compare an answer with the undisturbed one. Return the first difference, which begins with ``lost``, ``doubled`` or ``changed``; empty if
    the answer is a beginning of the undisturbed one."""
    for place, (right, token) in enumerate(zip(expected.tokens, answer.tokens, strict=False)):
        if right != token:
            kind = "doubled" if place and token == expected.tokens[place - 1] else "changed"
            return f"{kind}: token {place} is {token}, undisturbed {right}"
    if len(answer.tokens) > len(expected.tokens):
        return f"doubled: {len(answer.tokens)} tokens, undisturbed {len(expected.tokens)}"
    if not expected.text.startswith(answer.text) or answer.made_by - expected.made_by:
        return "changed: the text, or the fingerprint"
    is_equal = (answer.tokens, answer.text, answer.finish) == (
        expected.tokens,
        expected.text,
        expected.finish,
    )
    if answer.done and not is_equal:
        return f"lost: {len(answer.tokens)} tokens of {len(expected.tokens)}"
    return ""


def pool(seed: int, distinct: int) -> list[dict[str, Any]]:
    """Return the bodies of distinct requests."""
    draw = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [draw.randrange(_VOCABULARY) for _ in range(draw.randint(1, most))]

    stems = [ids(160) for _ in range(8)]
    return [
        {
            "model": "survivor",
            "prompt": (draw.choice(stems) if draw.random() < 0.4 else []) + ids(140),
            "max_tokens": draw.randint(4, 48),
            "seed": draw.randrange(1 << 40),
            "temperature": draw.choice([0, 0.7, 1, 1.5]),
            "top_p": draw.choice([1, 1, 0.9]),
            "logprobs": draw.randint(0, 3),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        for _ in range(distinct)
    ]


@dataclass
class SurvivalReport:
    """Counts of requests and faults, and the differences."""

    requests: int = 0
    """Complete and right answers."""
    attempts: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    sent_away: int = 0
    """Responses 429 and 503, after which the client sent the request again."""
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        """Return the report as a line of text."""
        faults = sum(self.faults.values())
        return (
            f"{self.requests} requests ({self.tokens} tokens, {self.attempts} attempts, {self.sent_away} sent away) under {faults} faults in "
            f"{self.seconds:.0f} s: {len(self.wrong)} wrong; {dict(sorted(self.faults.items()))}"
        )


class Survival:
    """The clients of a service, and the faults that strike it meanwhile."""

    def __init__(
        self,
        service: Service,
        bodies: list[dict[str, Any]],
        expected: list[StreamedAnswer],
        faults: list[Fault],
        seed: int,
    ) -> None:
        self.report = SurvivalReport(wrong=service.wrong)
        self._service, self._bodies, self._expected = service, bodies, expected
        self._faults, self._draw = faults, random.Random(f"requests {seed}")
        self._sent = 0
        self._struck = asyncio.Event()
        self._hang_up = 0

    async def go(self, requests: int, concurrency: int) -> None:
        """Send ``requests`` requests, and strike at the same pace. ``report`` has the results so far at any time."""
        began = time.monotonic()
        self._requests = requests
        numbers = iter(range(requests))
        work = [asyncio.create_task(self._client(numbers)) for _ in range(concurrency)]
        strikes = asyncio.create_task(self._strike())
        clock = asyncio.create_task(self._keep_time(began))
        try:
            await asyncio.gather(*work, strikes)
            await self._rest()
        finally:
            for task in (*work, strikes, clock):
                task.cancel()
            await asyncio.gather(*work, strikes, clock, return_exceptions=True)
            await self._service.count()
            self.report.counts = dict(self._service.counts)
            if differ := self.report.counts.get("audit_differences"):
                self.report.wrong.append(f"{differ} audits differ")

    async def _keep_time(self, began: float) -> None:
        while True:
            await asyncio.sleep(1)
            self.report.seconds = time.monotonic() - began
            if int(self.report.seconds) % 20 == 0:
                print(self.report.line(), file=sys.stderr, flush=True)

    async def _strike(self) -> None:
        for fault in self._faults:
            while self._sent * len(self._faults) < fault.number * self._requests:
                await asyncio.sleep(0.02)
            if fault.kind == "hang up":
                self._hang_up += 1
                kind = fault.kind
            else:
                kind = await self._service.strike(fault)
            self.report.faults[kind] += 1
            self._struck.set()

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while number * len(self._faults) > (self.report.faults.total() + _AHEAD) * self._requests:
                self._struck.clear()
                await self._struck.wait()
            self._sent = max(self._sent, number)
            case = self._draw.randrange(len(self._bodies))
            await self._answer(number, case)

    async def _answer(self, number: int, case: int) -> None:
        """Send a request until its answer is complete."""
        end = time.monotonic() + _PATIENCE_S
        expected = self._expected[case]
        while time.monotonic() < end:
            answer = StreamedAnswer()
            leave_at = -1
            if self._hang_up:
                self._hang_up -= 1
                leave_at = self._draw.randrange(len(expected.tokens))
            life = self._service.life
            excused = await self._attempt(case, answer, leave_at) or life != self._service.life
            flaw = judged(expected, answer) or (f"failed: {answer.error}" if answer.error else "")
            if not flaw and not answer.done and not excused:
                flaw = "failed: the connection ended"
            if flaw:
                self.report.wrong.append(f"request {number}, case {case}: {flaw}")
                return
            if answer.done:
                self.report.requests += 1
                self.report.tokens += len(answer.tokens)
                return
            await asyncio.sleep(0.1)
        self.report.wrong.append(f"request {number}, case {case}: failed: no answer in {_PATIENCE_S:g} s")

    async def _attempt(self, case: int, answer: StreamedAnswer, leave_at: int) -> bool:
        """Send the request once. Return True if there is a reason for an answer that does not end."""
        service, port = self._service, 0
        try:
            async with service.client.stream(
                "POST", f"{service.url}/v1/completions", json=self._bodies[case], timeout=_PATIENCE_S
            ) as response:
                self.report.attempts += 1
                if response.status_code in (429, 503):
                    body = await response.aread()
                    if b"no worker is left" in body:
                        answer.error = body.decode()
                    self.report.sent_away += 1
                    await asyncio.sleep(min(2.0, float(response.headers.get("Retry-After", 1))))
                    return True
                port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                service.clients[port] = False
                if response.status_code != 200:
                    answer.error = (await response.aread()).decode()
                    return False
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        answer.done = not answer.error
                    elif line.startswith("data: "):
                        answer.take(json.loads(line[6:]))
                        if len(answer.tokens) > leave_at >= 0:
                            return True
            return False
        except httpx.TransportError:
            return service.away or service.clients.get(port, False)
        finally:
            service.clients.pop(port, None)

    async def _rest(self) -> None:
        """Wait until all workers are ready and hold nothing for ended texts."""
        end = time.monotonic() + _PATIENCE_S
        left: dict[str, float] = {}
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                health = (await self._service.client.get(f"{self._service.url}/health")).json()
                now = await self._service.metrics()
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
                left = {name: now[name] for name in names}
                jobs = sum(worker["jobs"] for worker in health["workers"])
                if (
                    not jobs
                    and not any(left.values())
                    and all(w["state"] == "ready" for w in health["workers"])
                ):
                    return
            await asyncio.sleep(0.2)
        self.report.wrong.append(f"at rest something is left: {left}, {health['workers']}")


async def undisturbed(run: Path, log: Path, bodies: list[dict[str, Any]]) -> list[StreamedAnswer]:
    """Return the answers of one process to each request by itself."""
    service = Service(run, ("--context", str(_CONTEXT), "--name", "survivor"), log)
    await service.start()
    try:
        quiet = Survival(service, bodies, [], [], 0)
        answers = []
        for case in range(len(bodies)):
            answer = StreamedAnswer()
            await quiet._attempt(case, answer, -1)
            if not answer.done:
                raise RuntimeError(f"the undisturbed service does not answer: {answer.error}")
            answers.append(answer)
        return answers
    finally:
        await service.end()


def make_run(run: Path) -> Path:
    """Write the directory of a run with random weights and a tokenizer of bytes."""
    from bench.common.saved_run import save_run_of_bytes
    from phalanx.run.kinds.whole_model import resolve
    from phalanx.run.spec import ModelSpec

    save_run_of_bytes(
        run, resolve(ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, ffn_dim=176, vocab_size=264)), _CONTEXT
    )
    return run


@dataclass(frozen=True)
class SurvivalLoad:
    """Requests and faults for a service, and its size."""

    requests: int
    faults: int
    seed: int = 0
    concurrency: int = 16
    distinct: int = 200
    workers: str = "prefill:1,decode:3"
    memory: str = "2MiB"
    audit: float = 0.02


async def survived(run: Path, load: SurvivalLoad, folder: Path, reports: list[SurvivalReport]) -> None:
    """Run a service under load and faults. Append the report to ``reports`` before the first request, so that it survives a cancellation."""
    bodies = pool(load.seed, load.distinct)
    expected = await undisturbed(run, folder / "undisturbed.log", bodies)
    print(f"{len(bodies)} undisturbed answers; output of the service: {folder}", file=sys.stderr, flush=True)
    options = ["--context", str(_CONTEXT), "--name", "survivor", "--threads", "1", "--workers", load.workers]
    options += ["--memory", load.memory, "--audit", str(load.audit)]
    service = Service(run, options, folder / "service.log")
    await service.start()
    try:
        survival = Survival(service, bodies, expected, drawn(load.seed, load.faults), load.seed)
        reports.append(survival.report)
        await survival.go(load.requests, load.concurrency)
    finally:
        await service.end()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--distinct", type=int, default=200, help="requests in the pool")
    parser.add_argument("--workers", default="prefill:1,decode:3")
    parser.add_argument("--memory", default="2MiB", help="of each worker's pages")
    parser.add_argument("--audit", type=float, default=0.02)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    settings = vars(parser.parse_args())
    run_dir, as_json = settings.pop("run_dir"), settings.pop("json")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the undisturbed process too: threads are part of the numerics
    reports: list[SurvivalReport] = []
    folder = Path(tempfile.mkdtemp(prefix="survives-"))

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await survived(run_dir or make_run(folder / "run"), SurvivalLoad(**settings), folder, reports)

    with suppress(asyncio.CancelledError):
        asyncio.run(run())
    if not reports:
        raise SystemExit("no request was sent yet")
    (report,) = reports
    print(json.dumps({**settings, **report.__dict__}) if as_json else report.line() + f"; {report.counts}")
    for flaw in report.wrong[:50]:
        print(flaw, file=sys.stderr)
    raise SystemExit(bool(report.wrong))


if __name__ == "__main__":
    run_bench(main)

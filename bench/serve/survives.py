"""Shows what survives: streamed requests to a service of real processes while faults strike it, each answer compared by bits.

    python -m bench.serve.survives --requests 10000 --faults 1000 --seed 0

A tiny model with random weights (or that of RUN_DIR) answers a pool of distinct requests, prompts of 1 to 300 tokens some of which begin alike, from one undisturbed process. Then
``phalanx serve --workers prefill:1,decode:3`` answers requests drawn from the pool, many at a time, while faults drawn from the seed strike (``bench.serve.faults``): workers and the gateway are killed, stand still, hand over; their
connections, transfers of pages and clients' connections are cut; clients hang up. A client whose connection ends sends the same request again. Of each
attempt, also of one that ends in the middle, every token, its log-probability and those of the likeliest others, and the text are compared with the undisturbed answer: what is not there at an answer's end is *lost*, what comes again
is *doubled*, what is another is *changed*. At the end no text may be running and no page in use. Pages are few (``--memory``), so that texts are preempted and prefixes evicted. Requests wait for the faults that are due before them.
Ctrl-C prints what was found so far. The exit code is 1 if anything was wrong.
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

Said = tuple[Any, ...]
"""A token as its client heard of it: id, log-probability, the likeliest others."""


@dataclass
class Heard:
    """The tokens, text and end of one streamed answer, as far as they have come."""

    tokens: list[Said] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    made_by: set[str] = field(default_factory=set)
    done: bool = False
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Adds an event of the stream."""
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.made_by.add(event["system_fingerprint"])
        choice = event["choices"][0]
        ids = choice["token_ids"] or []
        probable = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        others = probable["top_logprobs"] or [None] * len(ids)
        self.tokens += [
            (one, logprob, json.dumps(top))
            for one, logprob, top in zip(ids, probable["token_logprobs"], others, strict=True)
        ]
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish


def judged(wanted: Heard, heard: Heard) -> str:
    """Compares an answer with the undisturbed one: says whether a token was ``lost``, ``doubled`` or ``changed``, and where; empty if it has the same
    beginning, or is the same."""
    for place, (one, other) in enumerate(zip(wanted.tokens, heard.tokens, strict=False)):
        if one != other:
            kind = "doubled" if place and other == wanted.tokens[place - 1] else "changed"
            return f"{kind}: token {place} is {other}, undisturbed {one}"
    if len(heard.tokens) > len(wanted.tokens):
        return f"doubled: {len(heard.tokens)} tokens, undisturbed {len(wanted.tokens)}"
    if not wanted.text.startswith(heard.text) or heard.made_by - wanted.made_by:
        return "changed: the text, or the fingerprint"
    if heard.done and (heard.tokens, heard.text, heard.finish) != (wanted.tokens, wanted.text, wanted.finish):
        return f"lost: {len(heard.tokens)} tokens of {len(wanted.tokens)}"
    return ""


def pool(seed: int, distinct: int) -> list[dict[str, Any]]:
    """The bodies of distinct requests."""
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
class Found:
    """What was found."""

    requests: int = 0
    """Answers that came whole, and right."""
    attempts: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    sent_away: int = 0
    """429 and 503, after which the client asked again."""
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        """For people."""
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
        wanted: list[Heard],
        faults: list[Fault],
        seed: int,
    ) -> None:
        self.found = Found(wrong=service.wrong)
        self._service, self._bodies, self._wanted = service, bodies, wanted
        self._faults, self._draw = faults, random.Random(f"requests {seed}")
        self._asked = 0
        self._struck = asyncio.Event()
        self._hang_up = 0

    async def go(self, requests: int, concurrency: int) -> None:
        """Asks for so many answers, and strikes at the same pace. What is found is in ``found``, at any time."""
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
            self.found.counts = dict(self._service.counts)
            if differ := self.found.counts.get("audit_differences"):
                self.found.wrong.append(f"{differ} audits differ")

    async def _keep_time(self, began: float) -> None:
        while True:
            await asyncio.sleep(1)
            self.found.seconds = time.monotonic() - began
            if int(self.found.seconds) % 20 == 0:
                print(self.found.line(), file=sys.stderr, flush=True)

    async def _strike(self) -> None:
        for fault in self._faults:
            while self._asked * len(self._faults) < fault.number * self._requests:
                await asyncio.sleep(0.02)
            if fault.kind == "hang up":
                self._hang_up += 1
                kind = fault.kind
            else:
                kind = await self._service.strike(fault)
            self.found.faults[kind] += 1
            self._struck.set()

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while number * len(self._faults) > (self.found.faults.total() + _AHEAD) * self._requests:
                self._struck.clear()
                await self._struck.wait()
            self._asked = max(self._asked, number)
            case = self._draw.randrange(len(self._bodies))
            await self._answer(number, case)

    async def _answer(self, number: int, case: int) -> None:
        """Asks until the answer has come whole."""
        end = time.monotonic() + _PATIENCE_S
        wanted = self._wanted[case]
        while time.monotonic() < end:
            heard = Heard()
            leave_at = -1
            if self._hang_up:
                self._hang_up -= 1
                leave_at = self._draw.randrange(len(wanted.tokens))
            life = self._service.life
            excused = await self._attempt(case, heard, leave_at) or life != self._service.life
            what = judged(wanted, heard) or (f"failed: {heard.error}" if heard.error else "")
            if not what and not heard.done and not excused:
                what = "failed: the connection ended"
            if what:
                self.found.wrong.append(f"request {number}, case {case}: {what}")
                return
            if heard.done:
                self.found.requests += 1
                self.found.tokens += len(heard.tokens)
                return
            await asyncio.sleep(0.1)
        self.found.wrong.append(f"request {number}, case {case}: failed: no answer in {_PATIENCE_S:g} s")

    async def _attempt(self, case: int, heard: Heard, leave_at: int) -> bool:
        """Asks once; whether there is a reason for an answer that does not end."""
        service, port = self._service, 0
        try:
            async with service.client.stream(
                "POST", f"{service.url}/v1/completions", json=self._bodies[case], timeout=_PATIENCE_S
            ) as answer:
                self.found.attempts += 1
                if answer.status_code in (429, 503):
                    body = await answer.aread()
                    if b"no worker is left" in body:
                        heard.error = body.decode()
                    self.found.sent_away += 1
                    await asyncio.sleep(min(2.0, float(answer.headers.get("Retry-After", 1))))
                    return True
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                service.clients[port] = False
                if answer.status_code != 200:
                    heard.error = (await answer.aread()).decode()
                    return False
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        heard.done = not heard.error
                    elif line.startswith("data: "):
                        heard.take(json.loads(line[6:]))
                        if len(heard.tokens) > leave_at >= 0:
                            return True
            return False
        except httpx.TransportError:
            return service.away or service.clients.get(port, False)
        finally:
            service.clients.pop(port, None)

    async def _rest(self) -> None:
        """All workers come back, and nothing is held for texts that have ended."""
        end = time.monotonic() + _PATIENCE_S
        left: dict[str, float] = {}
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                health = (await self._service.client.get(f"{self._service.url}/health")).json()
                now = await self._service.metrics()
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
                left = {name: now[name] for name in names}
                jobs = sum(one["jobs"] for one in health["workers"])
                if (
                    not jobs
                    and not any(left.values())
                    and all(w["state"] == "ready" for w in health["workers"])
                ):
                    return
            await asyncio.sleep(0.2)
        self.found.wrong.append(f"at rest something is left: {left}, {health['workers']}")


async def undisturbed(run: Path, log: Path, bodies: list[dict[str, Any]]) -> list[Heard]:
    """What one process answers, each request by itself."""
    service = Service(run, ("--context", str(_CONTEXT), "--name", "survivor"), log)
    await service.start()
    try:
        quiet = Survival(service, bodies, [], [], 0)
        answers = []
        for case in range(len(bodies)):
            heard = Heard()
            await quiet._attempt(case, heard, -1)
            if not heard.done:
                raise RuntimeError(f"the undisturbed service does not answer: {heard.error}")
            answers.append(heard)
        return answers
    finally:
        await service.end()


def make_run(run: Path) -> Path:
    """The directory of a run with random weights and a tokenizer of bytes."""
    from bench.common.saved_run import save_run_of_bytes
    from phalanx.run.kinds.whole_model import resolve
    from phalanx.run.spec import ModelSpec

    save_run_of_bytes(
        run, resolve(ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, ffn_dim=176, vocab_size=264)), _CONTEXT
    )
    return run


@dataclass(frozen=True)
class Asked:
    """How much is asked of the service."""

    requests: int
    faults: int
    seed: int = 0
    concurrency: int = 16
    distinct: int = 200
    workers: str = "prefill:1,decode:3"
    memory: str = "2MiB"
    audit: float = 0.02


async def survived(run: Path, asked: Asked, folder: Path, found: list[Found]) -> None:
    """Runs it; what is found is put into ``found`` before it begins to be, and is there when this is cancelled."""
    bodies = pool(asked.seed, asked.distinct)
    wanted = await undisturbed(run, folder / "undisturbed.log", bodies)
    print(
        f"{len(bodies)} undisturbed answers; what the service prints: {folder}", file=sys.stderr, flush=True
    )
    options = ["--context", str(_CONTEXT), "--name", "survivor", "--threads", "1", "--workers", asked.workers]
    options += ["--memory", asked.memory, "--audit", str(asked.audit)]
    service = Service(run, options, folder / "service.log")
    await service.start()
    try:
        survival = Survival(service, bodies, wanted, drawn(asked.seed, asked.faults), asked.seed)
        found.append(survival.found)
        await survival.go(asked.requests, asked.concurrency)
    finally:
        await service.end()


def main() -> None:
    """The command."""
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
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    given = vars(parser.parse_args())
    run_dir, as_json = given.pop("run_dir"), given.pop("json")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the undisturbed process too: threads are part of the numerics
    found: list[Found] = []
    folder = Path(tempfile.mkdtemp(prefix="survives-"))

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await survived(run_dir or make_run(folder / "run"), Asked(**given), folder, found)

    with suppress(asyncio.CancelledError):
        asyncio.run(run())
    if not found:
        raise SystemExit("nothing was asked yet")
    one = found[0]
    print(json.dumps({**given, **one.__dict__}) if as_json else one.line() + f"; {one.counts}")
    for what in one.wrong[:50]:
        print(what, file=sys.stderr)
    raise SystemExit(bool(one.wrong))


if __name__ == "__main__":
    run_bench(main)

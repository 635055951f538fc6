"""The live router over real sockets, with workers in threads: clients get the outputs of one engine, even if workers are lost meanwhile."""

from __future__ import annotations

import asyncio
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.wire.connection import sealed
from phalanx.wire.messages import UnprovenError
from phalanx_serve.engine.engine import Engine
from phalanx_serve.kv_cache.memory import kv_format, page_bytes
from phalanx_serve.traffic import events, pools
from phalanx_serve.traffic.events import (
    Ended,
    EngineOutput,
    PromptScored,
    Request,
    Role,
    Sampling,
    WorkerIdentity,
)
from phalanx_serve.workers import messages as m
from phalanx_serve.workers import page_transfer, serving_worker
from phalanx_serve.workers import router as router_module
from phalanx_serve.workers.page_transfer import PageServer, PageWay, Way, pull
from phalanx_serve.workers.router import Peer, RequestRouter, RouterSettings, Watcher
from phalanx_serve.workers.serving_worker import ServingWorker

TOKEN = "the service's token"
SPEC = resolve(ModelSpec(layers=1, dim=32, heads=2, kv_heads=2, head_dim=16, vocab_size=160, init_std=0.3))
PAGE_BYTES = page_bytes(SPEC, kv_format("compute", SPEC, torch.float32))


def built() -> Transformer:
    model: Transformer = initialized(SPEC).requires_grad_(False).eval()
    return model


def engine(model: Transformer) -> Engine:
    return Engine(model, SPEC, pages=64, rows=64, weights_id="w")


def put_all(outputs: queue.SimpleQueue[EngineOutput], new_outputs: Sequence[EngineOutput]) -> None:
    for output in new_outputs:
        outputs.put(output)


@dataclass
class Running:
    """A worker in threads of this process."""

    link: socket.socket
    server: PageServer
    thread: threading.Thread
    end_reason: str = "works"
    """Reason for its end; empty if nothing is wrong."""

    def work(self, worker: ServingWorker) -> None:
        """Work until the end."""
        self.end_reason = worker.run()

    def kill(self) -> None:
        """Cut all its connections, as the kernel does for a process that is killed."""
        self.link.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join()
        self.link.close()


@dataclass
class Fleet:
    """A router in a thread, and its workers."""

    router: RequestRouter
    loop: asyncio.AbstractEventLoop
    address: tuple[str, int]
    joined: queue.SimpleQueue[int]
    left: queue.SimpleQueue[tuple[int, str]]
    workers: dict[int, Running] = field(default_factory=dict)
    pages: PageWay = "auto"

    def start(
        self, number: int, role: Role, model: Transformer, *, weights: str = "w", token: str = TOKEN
    ) -> None:
        """Start a worker, which then joins or is refused."""
        connection = socket.create_connection(self.address)
        link = sealed(connection, "the router", token, "client", m.PURPOSE, 60.0)
        link.send_message(m.Opening(number, 1))
        own = engine(model)
        identity = WorkerIdentity(weights, "numerics", "pages")
        worker = ServingWorker(own, identity, PAGE_BYTES, TOKEN, link, pages=self.pages)
        server = PageServer(worker.offered, identity, TOKEN)
        door = m.PageDoor("127.0.0.1", server.port)
        link.send_message(m.WorkerReady(identity, role, own.root, 2048, 64, PAGE_BYTES, 1000.0, door))
        running = Running(connection, server, threading.Thread(target=lambda: running.work(worker)))
        self.workers[number] = running
        running.thread.start()

    def submit(self, request: Request) -> queue.SimpleQueue[EngineOutput]:
        """Submit a request; its outputs arrive in the queue."""
        outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        sink = partial(put_all, outputs)
        self.loop.call_soon_threadsafe(self.router.submit, request, sink)
        return outputs

    def submit_at_once(self, requests: Sequence[Request]) -> dict[str, queue.SimpleQueue[EngineOutput]]:
        """Submit all requests before any worker can answer, and let the router look at its queues then."""

        async def submit_all() -> dict[str, queue.SimpleQueue[EngineOutput]]:
            outputs: dict[str, queue.SimpleQueue[EngineOutput]] = {
                request.id: queue.SimpleQueue() for request in requests
            }
            for request in requests:
                self.router.submit(request, partial(put_all, outputs[request.id]))
            self.router._hear(events.ClockTick())
            return outputs

        return asyncio.run_coroutine_threadsafe(submit_all(), self.loop).result()

    def turn(self, number: int, role: Role) -> None:
        """Give a worker another role."""

        def change() -> None:
            self.router.traffic.pool.workers[number].role = role

        self.loop.call_soon_threadsafe(change)


@contextmanager
def fleet(
    model: Transformer, *roles: Role, audit_share: float = 0.0, pages: PageWay = "auto"
) -> Iterator[Fleet]:
    """A service whose workers have all joined."""
    joined: queue.SimpleQueue[int] = queue.SimpleQueue()
    left: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def record_reason(peer: Peer, reason: str) -> None:
        left.put((peer.number, reason))

    watcher = Watcher(lambda peer: joined.put(peer.number), record_reason, record_reason, record_reason)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[RequestRouter, asyncio.Server]:
        router = RequestRouter(TOKEN, RouterSettings(64, audit_share, late_s=3600.0), watcher)
        return router, await router.listen("127.0.0.1")

    router, server = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    made = Fleet(router, loop, server.sockets[0].getsockname()[:2], joined, left, pages=pages)
    try:
        for number, role in enumerate(roles):
            made.start(number, role, model)
            joined.get(timeout=60)
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(router.end(), loop).result()
        for worker in made.workers.values():
            worker.thread.join()
            worker.server.close()
            worker.link.close()
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def requests() -> list[Request]:
    draw = random.Random(1)
    shared = tuple(draw.randrange(160) for _ in range(130))
    return [
        Request(
            f"r{number}",
            shared[: length // 2] + tuple(draw.randrange(160) for _ in range(length - length // 2)),
            tokens,
            Sampling(seed=number, temperature=0.8),
            top_logprobs=2,
            prompt_logprobs=number == 3,
        )
        for number, (length, tokens) in enumerate(
            [(3, 20), (64, 15), (150, 20), (200, 5), (260, 30), (131, 1)]
        )
    ]


def alone(model: Transformer, requests: Sequence[Request]) -> dict[str, list[EngineOutput]]:
    """Outputs of one engine that serves all requests."""
    served = engine(model)
    outputs: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    for request in requests:
        served.submit(request)
    while served.busy:
        for output in served.step():
            outputs[output.request].append(output)
    return outputs


def received(outputs: queue.SimpleQueue[EngineOutput]) -> list[EngineOutput]:
    """Outputs that a client receives, up to the end."""
    until_end = [outputs.get(timeout=120)]
    while not isinstance(until_end[-1], Ended):
        until_end.append(outputs.get(timeout=120))
    return until_end


def words(outputs: list[EngineOutput]) -> list[object]:
    """Outputs without the count that may differ: how many tokens were already in pages."""
    return [(output.outcome, output.text) if isinstance(output, Ended) else output for output in outputs]


@pytest.mark.parametrize(
    ("roles", "way"),
    [
        (("both",), "memory"),
        (("prefill", "decode"), "memory"),
        (("prefill", "decode"), "socket"),
        (("both", "decode"), "memory"),
        (("prefill", "prefill", "decode", "decode", "decode"), "memory"),
        (("prefill", "prefill", "decode", "decode", "decode"), "socket"),
    ],
)
def test_clients_receive_from_any_workers_the_outputs_of_one_engine(
    roles: tuple[Role, ...], way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_worker, "pull", partial(pull, only=way))
    model, submitted = built(), requests()
    right = alone(model, submitted)
    with fleet(model, *roles) as served:
        queues = {request.id: served.submit(request) for request in submitted}
        for name, outputs in queues.items():
            assert words(received(outputs)) == words(right[name])


def test_workers_that_change_sides_at_any_time_change_no_token() -> None:
    model, submitted, draw = built(), requests(), random.Random(3)
    right = alone(model, submitted)
    with fleet(model, "prefill", "prefill", "decode", "decode", "decode") as served:
        pool = served.router.traffic.pool
        # At the 1,000 rows/s that workers report, long prompts wait 0.37 s, and the two short texts, which decode workers compute, 0.02 s.
        pool.settings = replace(pool.settings, wait_s=0.1, patience_s=0.0, rest_s=1e6)
        queues = served.submit_at_once(submitted)
        for name, outputs in queues.items():
            assert words(received(outputs)) == words(right[name])
        assert [worker.role for worker in pool.workers.values()].count("prefill") == 3
        again = [structs.replace(request, id=f"again {request.id}") for request in submitted]
        queues = served.submit_at_once(again)
        for number in (draw.randrange(5) for _ in range(20)):
            served.turn(number, draw.choice(["prefill", "decode", "both"]))
            time.sleep(draw.uniform(0, 0.02))
        for request in submitted:
            outputs = received(queues[f"again {request.id}"])
            renamed = [structs.replace(output, request=request.id) for output in outputs]
            assert words(renamed) == words(right[request.id])


def test_workers_are_sent_away_at_the_end_and_none_is_reported_lost() -> None:
    with fleet(built(), "prefill", "decode") as served:
        outputs = served.submit(requests()[0])
        received(outputs)
    assert [worker.end_reason for worker in served.workers.values()] == ["", ""]  # not "the connection ended"
    assert served.left.empty()


@pytest.mark.parametrize(
    ("trouble", "counted"),
    [("none", (8, 8, 0)), ("unreachable", (8, 0, 0)), ("damaged", (0, 0, 8)), ("only sockets", (8, 0, 0))],
)
def test_a_decode_worker_pulls_the_pages_of_a_prompt_or_computes_them_and_the_text_is_the_same(
    trouble: str,
    counted: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def elsewhere(*_: object) -> memoryview:
        raise PermissionError("another user's")

    if trouble == "unreachable":
        monkeypatch.setattr(page_transfer, "opened", elsewhere)
    elif trouble == "damaged":
        digests = map(str.encode, map(str, count()))  # the reader's is never the source's
        monkeypatch.setattr(page_transfer, "fast_digest", lambda _: next(digests))
    model = built()
    (request,) = [request for request in requests() if len(request.prompt) == 260]
    submitted = [request, structs.replace(request, id="backwards", prompt=request.prompt[::-1])]
    right = alone(model, submitted)
    with fleet(model, "prefill", "decode", pages="socket" if trouble == "only sockets" else "auto") as served:
        for request in submitted:
            assert words(received(served.submit(request))) == words(right[request.id])
        while (beat := served.router.peers[1].beat) is None or beat.pulled + beat.not_pulled < 8:
            time.sleep(0.02)
        assert (beat.pulled, beat.shared, beat.not_pulled) == counted
    warnings = caplog.text.count("the memory of a worker of this machine cannot be read (another user's)")
    assert warnings == (1 if trouble == "unreachable" else 0)


@pytest.mark.parametrize("seed", range(2))
def test_workers_that_are_lost_at_any_time_lose_and_change_no_token(seed: int) -> None:
    model, submitted, draw = built(), requests(), random.Random(seed)
    right = alone(model, submitted)
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    with fleet(model, *roles) as served:
        queues = {request.id: served.submit(request) for request in submitted}
        for _ in range(4):
            victim = draw.randrange(3)
            time.sleep(draw.uniform(0, 0.05))
            served.workers[victim].kill()
            assert served.left.get(timeout=60)[0] == victim
            served.start(victim, roles[victim], model)
            served.joined.get(timeout=60)
        for name, outputs in queues.items():
            assert words(received(outputs)) == words(right[name])
        assert served.router.traffic.counts["lost"] == 4


def test_a_worker_of_other_weights_is_refused_with_both_identities() -> None:
    model = built()
    with fleet(model, "both") as served:
        served.start(1, "both", model, weights="others")
        number, reason = served.left.get(timeout=60)
        assert number == 1
        assert "'w'" in reason
        assert "'others'" in reason


def test_a_peer_without_the_token_does_not_become_a_worker() -> None:
    model = built()
    with fleet(model, "both") as served:
        with pytest.raises(UnprovenError):
            served.start(1, "both", model, token="guessed")
        assert list(served.router.peers) == [0]


def test_strangers_that_connect_and_send_nothing_keep_no_worker_out() -> None:
    model = built()
    with fleet(model, "both") as served, ExitStack() as strangers:
        for _ in range(80):
            strangers.enter_context(socket.create_connection(served.address))
        served.start(1, "both", model)
        assert served.joined.get(timeout=60) == 1


def test_a_worker_that_computes_other_bits_is_set_aside_and_texts_are_right_again() -> None:
    model, wrong = built(), built()
    with torch.no_grad():
        next(wrong.parameters()).mul_(1.001)
    submitted = requests()
    right = alone(model, submitted)
    with fleet(model, "both", "both", "both", audit_share=1.0) as served:
        served.start(3, "both", wrong)
        served.joined.get(timeout=60)
        while 3 not in served.router.traffic.pool.quarantined:
            for outputs in [served.submit(request) for request in submitted]:
                received(outputs)
        number, reason = served.left.get(timeout=60)
        assert number == 3
        assert re.search(r"token \d+ \(id \d+\) .* is -0x\S+ by it and -0x\S+ by [23] others", reason)
        for request in submitted:
            assert words(received(served.submit(request))) == words(right[request.id])


def test_a_request_that_no_engine_can_compute_is_an_error_and_harms_no_other() -> None:
    model = built()
    with fleet(model, "both", "both") as served:
        (end,) = received(served.submit(Request("r", (500,), 3)))
        assert isinstance(end, Ended)
        assert end.outcome == "error"
        assert "vocabulary" in end.text
        scored, *_ = received(served.submit(Request("s", (1, 2), 1, prompt_logprobs=True)))
        assert isinstance(scored, PromptScored)


def test_a_request_that_comes_after_no_worker_is_left_ends_with_the_reason() -> None:
    async def submit_both() -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        nobody = Watcher(*([lambda *_: None] * 4))
        router = RequestRouter(TOKEN, RouterSettings(64), nobody)
        router.submit(Request("before", (1, 2), 3), outputs.extend)
        router.fail_all("no worker is left")
        router.submit(Request("after", (1, 2), 3), outputs.extend)
        return outputs

    assert asyncio.run(submit_both()) == [
        Ended(name, "error", "no worker is left") for name in ("before", "after")
    ]


def test_an_error_in_a_report_of_a_late_worker_ends_no_later_report(caplog: pytest.LogCaptureFixture) -> None:
    async def reports() -> list[int]:
        late: asyncio.Queue[int] = asyncio.Queue()

        def report(peer: Peer, _reason: str) -> None:
            late.put_nowait(peer.number)
            if peer.number == 0:
                raise ValueError("the report fails")

        def ignore(*_: object) -> None:
            pass

        watcher = Watcher(ignore, ignore, report, ignore)
        router = RequestRouter(TOKEN, RouterSettings(64, late_s=0.0, tick_s=0.01), watcher)
        server = await router.listen("127.0.0.1")
        numbers = []
        with ExitStack() as connections:
            for number in (0, 1):
                address = server.sockets[0].getsockname()[:2]
                connections.enter_context(await asyncio.to_thread(silent_worker, address, number))
                async with asyncio.timeout(30):
                    numbers.append(await late.get())
            await router.end()
        server.close()
        return numbers

    assert asyncio.run(reports()) == [0, 1]
    assert "the report fails" in caplog.text


def silent_worker(address: tuple[str, int], number: int) -> socket.socket:
    """Return the connection of a worker that becomes ready, and sends nothing from then on."""
    connection = socket.create_connection(address)
    link = sealed(connection, "the router", TOKEN, "client", m.PURPOSE, 60.0)
    link.send_message(m.Opening(number, 1))
    door = m.PageDoor("127.0.0.1", 1)
    link.send_message(
        m.WorkerReady(WorkerIdentity("w", "n", "p"), "both", b"root", 2048, 64, PAGE_BYTES, 1e9, door)
    )
    return connection


def test_a_worker_that_is_late_is_reported_once_in_a_life_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[tuple[int, str]] = []
    now_s = 1e6
    monkeypatch.setattr(router_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def worker(life: int, silent_s: float, still_s: float) -> pools.PoolWorker:
        return pools.PoolWorker(
            1, life, "both", WorkerIdentity("w", "n", "p"), 4, 1e9, now_s - silent_s, now_s - still_s
        )

    async def watched() -> None:
        callbacks: list[Callable[..., None]] = [lambda *_: None] * 4
        callbacks[2] = lambda peer, reason: reports.append((peer.life, reason))
        router = RequestRouter(TOKEN, RouterSettings(64, late_s=3.0, tick_s=0.0), Watcher(*callbacks))
        tick = asyncio.create_task(router._tick())
        for life, silent_s, still_s in ((1, 4.0, 4.0), (2, 0.0, 12.0), (3, 0.0, 0.0)):
            router.peers[1] = SimpleNamespace(number=1, life=life)  # type: ignore[assignment]
            router.traffic.pool.workers[1] = worker(life, silent_s, still_s)
            for _ in range(20):  # a tick each
                await asyncio.sleep(0)
        tick.cancel()

    asyncio.run(watched())
    assert reports == [
        (1, "it has given no sign of life for 4 s"),
        (2, "its engine has made no step for 12 s"),
    ]

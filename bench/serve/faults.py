"""A service of real processes, and the faults that strike it: signals, cut connections, the death of its gateway. For ``bench.serve.survives``.

``phalanx serve --workers`` runs as a child process at one port. After the death of its gateway the service is started again there, as a supervisor would. Faults are drawn beforehand from a seed, as data. The victim
of each is drawn among the living processes when it strikes. Connections are cut by the kernel (``ss -K``, sock_diag(7) with SOCK_DESTROY, which needs
root): both ends find their socket aborted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WEIGHTS = {
    "kill worker": 12,
    "stop worker": 22,
    "hand over": 5,
    "cut worker": 5,
    "cut pages": 16,
    "cut client": 19,
    "hang up": 19,
    "kill gateway": 1,
    "stop gateway": 1,
}
"""How often each kind of fault strikes, in proportion."""
_STAYED_S, _SHORT_LIVES = 5.5, 3
"""A worker with so many short lives in a row is no victim until it has served for so long: after five, ``phalanx.process.restarts`` gives it up, as it should."""
_STARTS, _OUTLIVE_S = 5, 300
_COUNTERS = ("requests_moved", "pages_pulled", "pages_recomputed", "audits", "audit_differences")


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    number: int
    kind: str
    seconds: float
    """Time for which a process is stopped."""
    draw: float
    """Position of the victim among the candidates, in [0, 1)."""


def drawn(seed: int, faults: int) -> list[Fault]:
    """Draw the faults of a seed, in their order."""
    draw = random.Random(seed)
    kinds = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=faults)
    return [Fault(n, kind, round(draw.uniform(0.3, 6.0), 2), draw.random()) for n, kind in enumerate(kinds)]


@dataclass
class Process:
    """A worker that takes work."""

    pid: int
    role: str
    page_port: int
    ready_s: float
    stopped: bool = False


@dataclass
class Service:
    """A service under faults; see the module. Belongs to one event loop; ``wrong`` collects unexplained events."""

    run: Path
    options: Sequence[str]
    log: Path
    wrong: list[str] = field(default_factory=list)
    """A line for each event of the service that no fault explains."""
    workers: dict[int, Process] = field(default_factory=dict)
    life: int = 0
    """Number of starts of the gateway."""
    clients: dict[int, bool] = field(default_factory=dict)
    """Local ports of clients' connections; True if the connection was cut."""
    counts: Counter[str] = field(default_factory=Counter)
    """``_COUNTERS`` of gateways that are gone."""

    def __post_init__(self) -> None:
        self._port = free_port()
        self._short: Counter[int] = Counter()
        self._router_port = 0
        self._up = asyncio.Event()
        self._killed = True
        self._tasks: set[asyncio.Task[None]] = set()
        self.client = httpx.AsyncClient(timeout=20)

    @property
    def url(self) -> str:
        """URL at which the service takes requests."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def away(self) -> bool:
        """True from the death of a gateway until the next one takes requests."""
        return self._killed or not self._up.is_set()

    async def start(self) -> None:
        """Start the service, and wait until it takes requests. Raises RuntimeError if several attempts fail."""
        self.life += 1
        for _ in range(_STARTS):
            await self._start()
            if self._process.returncode is None:
                return
            self.counts["failed_starts"] += 1  # a machine that is busy for minutes can cause it
        raise RuntimeError(f"the service ended at its start {_STARTS} times; {self.log} has the reason")

    async def _start(self) -> None:
        command = [sys.executable, "-m", "phalanx", "serve", str(self.run), "--json"]
        command += ["--port", str(self._port), *self.options]
        self._up.clear()
        self._short.clear()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 20
            )
        self._reader = self._keep(self._read())
        await self._up.wait()
        self._killed = self._process.returncode is not None

    async def end(self) -> None:
        """End the service and every task that waits for it."""
        self._killed = True
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()

    async def metrics(self) -> dict[str, float]:
        """Return the sums of /metrics over labels, by name."""
        sums: Counter[str] = Counter()
        for line in (await self.client.get(f"{self.url}/metrics")).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                sums[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
        return dict(sums)

    async def count(self) -> None:
        """Add the counters of this gateway to ``counts`` before its end."""
        with suppress(httpx.HTTPError):
            now = await self.metrics()
            self.counts.update({name: int(now.get(f"phalanx_{name}_total", 0)) for name in _COUNTERS})

    # Faults.

    async def strike(self, fault: Fault) -> str:
        """Carry a fault out once there is a victim. Return the kind of fault that happened."""
        match fault.kind:
            case "kill worker":
                _signal((await self._victim(fault)).pid, signal.SIGKILL)
            case "hand over":
                _signal((await self._victim(fault)).pid, signal.SIGTERM)
            case "stop worker":
                victim = await self._victim(fault)
                victim.stopped = True
                self._keep(_stopped(victim.pid, fault.seconds, victim))
            case "cut worker":
                victim = await self._victim(fault)
                while not _cut(f"dport = :{self._router_port}", victim.pid):
                    await asyncio.sleep(0.1)  # the victim has ended, and its event has not arrived yet
                    victim = await self._victim(fault)
            case "cut pages":
                return await self._cut_pages(fault)
            case "cut client":
                await self._cut_client(fault)
            case "stop gateway":
                self._keep(_stopped(self._process.pid, fault.seconds / 2))
            case "kill gateway":
                await self.count()
                await self._kill_gateway()
        return fault.kind

    async def _victim(self, fault: Fault) -> Process:
        while True:
            candidates = [
                worker
                for number, worker in sorted(self.workers.items())
                if self._may_be_struck(number, worker)
            ]
            if candidates:
                return candidates[int(fault.draw * len(candidates))]
            await asyncio.sleep(0.05)

    def _may_be_struck(self, number: int, worker: Process) -> bool:
        if worker.stopped:
            return False
        return self._short[number] < _SHORT_LIVES or time.monotonic() - worker.ready_s > _STAYED_S

    async def _cut_pages(self, fault: Fault) -> str:
        """Cut a running transfer of pages: stop its source until there is one. If none comes, the fault was only a stop."""
        source = await self._victim(fault)
        source.stopped = True
        _signal(source.pid, signal.SIGSTOP)
        end = time.monotonic() + 4
        try:
            while time.monotonic() < end:
                if _cut(f"dport = :{source.page_port}"):
                    return fault.kind
                await asyncio.sleep(0.03)
        finally:
            _signal(source.pid, signal.SIGCONT)
            source.stopped = False
        return "stop worker"

    async def _cut_client(self, fault: Fault) -> None:
        while True:
            ports = sorted(port for port, cut in self.clients.items() if not cut)
            if ports:
                port = ports[int(fault.draw * len(ports))]
                self.clients[port] = True
                if _cut(f"sport = :{port} and dport = :{self._port}"):
                    return
                if port in self.clients:
                    self.clients[port] = False
            await asyncio.sleep(0.02)

    async def _kill_gateway(self) -> None:
        pids = [worker.pid for worker in self.workers.values()]
        self._killed = True
        self._process.kill()
        await self._reader
        end = time.monotonic() + _OUTLIVE_S
        while any(_lives(pid) for pid in pids):
            if time.monotonic() > end:
                self.wrong.append(f"workers outlived their gateway by {_OUTLIVE_S} s")
                break
            await asyncio.sleep(0.05)
        await self.start()

    # Events on its standard output.

    async def _read(self) -> None:
        process = self._process
        assert process.stdout is not None
        async for line in process.stdout:
            self._handle(json.loads(line))
        code = await process.wait()
        if not self.away:
            self.wrong.append(f"the gateway ended by itself ({code}); {self.log} has the reason")
        self.workers.clear()
        self._up.set()

    def _handle(self, event: dict[str, Any]) -> None:
        number = event.get("worker", -1)
        match event["event"]:
            case "router-listening":
                self._router_port = int(event["address"].rpartition(":")[2])
            case "worker-ready":
                port = int(event["pages"].rpartition(":")[2])
                self.workers[number] = Process(event["pid"], event["role"], port, time.monotonic())
            case "listening":
                self._up.set()
            case "worker-ended":
                worker = self.workers.pop(number, None)
                served_s = 0.0 if worker is None else time.monotonic() - worker.ready_s
                self._short[number] = 0 if served_s > _STAYED_S else self._short[number] + 1
                if event["again_s"] is None:
                    self.wrong.append(f"given up: {event['text']}")
            case "worker-set-aside" | "worker-unable":
                self.wrong.append(event["text"])

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _stopped(pid: int, seconds: float, worker: Process | None = None) -> None:
    _signal(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pid, signal.SIGCONT)
        if worker is not None:
            worker.stopped = False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _cut(filter_: str, pid: int = 0) -> bool:
    """Let the kernel end established connections by a filter of ss(8), of one process if ``pid`` is not 0. Return True if there was one."""
    if pid:
        listed = subprocess.run(
            ["ss", "-Htnp", "state", "established", filter_], capture_output=True, text=True, check=True
        ).stdout
        mine = [line.split()[2].rpartition(":")[2] for line in listed.splitlines() if f"pid={pid}," in line]
        return any(_cut(f"sport = :{port} and {filter_}") for port in mine)
    command = ["ss", "-HKtn", "state", "established", filter_]
    return bool(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def free_port() -> int:
    """Return a port below those that the kernel gives to clients, so that it is still free when the service is started again."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

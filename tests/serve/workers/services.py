"""Starts ``phalanx serve --workers`` in a process of its own, and knows its workers' processes from what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 250.0


def until(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it holds."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


class Service:
    """A server of several workers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.pids: dict[int, int] = {}
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if said["event"] == "worker-ready":
                self.pids[said["worker"]] = said["pid"]
            self.lines.append(said)
            self.url = said.get("url", self.url)

    def begun(self) -> bool:
        """Whether it takes requests, or has ended."""
        return bool(self.url) or self.process.poll() is not None

    def workers(self) -> list[dict[str, Any]]:
        """Its workers, as /health tells them."""
        return list(httpx.get(self.url.replace("/v1", "/health"), timeout=100).json()["workers"])

    def busy(self, role: str) -> int | None:
        """The number of a worker of a role that has a job."""
        return next((w["number"] for w in self.workers() if w["role"] == role and w["jobs"]), None)

    def busy_process(self, role: str) -> int | None:
        """The process of a worker of a role that has a job."""
        number = self.busy(role)
        return None if number is None else self.pids[number]

    def whole(self) -> bool:
        """Whether all workers are ready."""
        return all(worker["state"] == "ready" for worker in self.workers())

    def send(self, worker: int, sig: signal.Signals) -> None:
        """Sends a signal to a worker's process."""
        os.kill(self.pids[worker], sig)

    def count(self, name: str) -> float:
        """A number of /metrics, over all labels."""
        text = httpx.get(self.url.replace("/v1", "/metrics"), timeout=100).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def service(run: Path, *options: str) -> Iterator[Service]:
    """A service that takes requests, or that has ended at its start."""
    command = [sys.executable, "-m", "phalanx", "serve", str(run), "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    served = Service(process)
    try:
        until(served.begun)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()

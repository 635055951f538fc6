"""Start ``phalanx serve --workers`` in a process of its own, with the processes of its workers."""

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

from phalanx_process import alive

PATIENCE_S = 250.0
NO_PROCESS = -1


def until(condition: Callable[[], Any]) -> Any:
    """Wait until the condition holds, and return its value."""
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


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
            event = json.loads(line)
            if event["event"] == "worker-ready":
                self.pids[event["worker"]] = event["pid"]
            self.lines.append(event)
            self.url = event.get("url", self.url)

    def has_begun(self) -> bool:
        """Return True if it takes requests, or has ended."""
        return bool(self.url) or self.process.poll() is not None

    def workers(self) -> list[dict[str, Any]]:
        """Its workers, from /health."""
        return list(httpx.get(self.url.replace("/v1", "/health"), timeout=100).json()["workers"])

    def busy(self, role: str) -> int | None:
        """The number of a worker of a role that has a job."""
        return next((w["number"] for w in self.workers() if w["role"] == role and w["jobs"]), None)

    def busy_process(self, role: str) -> int | None:
        """The process of a worker of a role that has a job."""
        number = self.busy(role)
        return None if number is None else self.pids.get(number)

    def all_ready(self) -> bool:
        """Return True if all workers are ready, each in the process that was reported last.

        The router may not have noticed yet that a process was killed, and the line on a new one may still be unread.
        """
        return all(
            worker["state"] == "ready" and alive(self.pids.get(worker["number"], NO_PROCESS))
            for worker in self.workers()
        )

    def send(self, worker: int, sig: signal.Signals) -> None:
        """Send a signal to a worker's process."""
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
        until(served.has_begun)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()

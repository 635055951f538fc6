"""The server of the page in a process of its own, its viewers, and the cost of a process, for benches.

Viewers do the same as an open page: each follows the changes, and requests the newest numbers after each. They share one process, which runs this
module as a program.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread


@contextmanager
def page(folder: Path, cache: Path) -> Iterator[tuple[str, int]]:
    """Start ``phalanx ui`` over a folder, with its cache in another. Yields its address and process id."""
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", "0", "--no-open"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    address = process.stdout.readline().split()[0].rstrip("/")
    try:
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process now, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def view(address: str, over: Flag) -> None:
    """Follow the changes as an open page does, and request the newest numbers after each, until ``over``."""
    while not over.is_set():
        with (
            suppress(OSError, ValueError),
            urllib.request.urlopen(f"{address}/api/events", timeout=20) as events,
        ):
            for line in events:
                if over.is_set():
                    return
                if line.startswith(b"data: ") and (run := json.loads(line[6:]).get("id")):
                    fetch(f"{address}/api/run/{run}")
                    fetch(f"{address}/api/run/{run}/curves?names=loss,lr,tokens_per_s&points=800")


@contextmanager
def viewers(address: str, number: int) -> Iterator[None]:
    """Start ``number`` viewers in a process of their own, and here one that sends a request and never reads."""
    port = int(address.rpartition(":")[2])
    stalled = socket.create_connection(("127.0.0.1", port))
    stalled.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    process = subprocess.Popen([sys.executable, "-m", "bench.watch.page_viewers", address, str(number)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        stalled.close()


def look(address: str, number: int) -> None:
    """Run viewers until this process is ended, at low priority, since they belong to other machines."""
    os.nice(19)
    over = Flag()
    threads = [Thread(target=view, args=(address, over), daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    look(sys.argv[1], int(sys.argv[2]))

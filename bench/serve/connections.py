"""Many idle and slow connections to ``phalanx serve`` beside an honest client: ``python -m bench.serve.connections --connections 10000``.

A tiny model is served by a real process. This one opens connections of four kinds in turn: silent ones, ones with half a head of a request, ones that have been answered and are kept, and ones with half
a body. Connections that the server ends (after 30 or 60 s) are opened again. With all of them open, ``/health`` is requested and texts are streamed, each on a new connection. Then connections are
opened up to the server's limit of descriptors and ``--beyond`` it, which end the oldest idle ones, and the same requests are sent again. The server must hold ``--connections`` in the first part, and every answer must arrive in both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bench.running import run_bench
from bench.serve.survives import make_run

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
_KINDS = (b"", b"GET /health HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", _HEAD)


class Holder:
    """Connections of all kinds in turn, each opened again when the server ends it: the server keeps none of them for ever."""

    def __init__(self, port: int) -> None:
        self._port, self._number = port, 0
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self.again = 0
        """Number of connections that were opened again."""

    def open(self, count: int) -> None:
        """Open ``count`` more connections."""
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", self._port), timeout=60)
            payload = _KINDS[self._number % len(_KINDS)]
            self._number += 1
            if payload:
                connection.sendall(payload)
            connection.setblocking(False)
            self._sockets[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)

    def held(self) -> int:
        """Return the number of connections that the server has not ended, and drop the others."""
        for number, _ in self._poll.poll(0):
            if not _is_open(self._sockets[number]):
                self._poll.unregister(number)
                self._sockets.pop(number).close()
        return len(self._sockets)

    def keep(self, count: int, over: threading.Event) -> None:
        """Keep ``count`` connections open until ``over``."""
        while not over.wait(0.1):
            missing = count - self.held()
            self.again += missing
            self.open(missing)


def _is_open(connection: socket.socket) -> bool:
    """Read the arrived bytes of an answer. Return True if the connection is still open behind them."""
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def honest(url: str, texts: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of /health, to the first token, and of a full streamed text, for each of ``texts`` texts. Raises if one fails."""
    healths, firsts, wholes = [], [], []
    for seed in range(texts):
        began = time.perf_counter()
        httpx.get(f"{url}/health", timeout=60).raise_for_status()
        healths.append(time.perf_counter() - began)
        body = {
            "model": "run",
            "prompt": "a text",
            "max_tokens": 32,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
        }
        began, first, tokens = time.perf_counter(), 0.0, ""
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                first = first or time.perf_counter() - began
                tokens = line or tokens
        if tokens != "data: [DONE]":
            raise SystemExit(f"an honest text did not come to its end: {tokens}")
        firsts.append(first)
        wholes.append(time.perf_counter() - began)
    return healths, firsts, wholes


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _times_line(name: str, times: tuple[list[float], list[float], list[float]]) -> str:
    median = [f"{1000 * statistics.median(some):.0f} ms (at most {1000 * max(some):.0f})" for some in times]
    return f"{name}: /health {median[0]}, first token {median[1]}, 32 tokens {median[2]}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--beyond", type=int, default=2_000, help="connections beyond the server's limit")
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object too")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    descriptors = options.connections + 1_000
    if descriptors + options.beyond > hard:
        raise SystemExit(
            f"ulimit -Hn is {hard}: this process may hold no {descriptors + options.beyond} connections"
        )
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run")
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "serve",
            str(run),
            "--port",
            "0",
            "--json",
            "--context",
            "512",
        ]
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_NOFILE, (min(1024, descriptors), descriptors)
            ),
        )
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"].removesuffix("/v1")
            port = urlsplit(url).port or 0
            report(_times_line("no other connection", honest(url, options.texts)))
            holder, over = Holder(port), threading.Event()
            began = time.perf_counter()
            holder.open(options.connections)
            took_s = time.perf_counter() - began
            keeper = threading.Thread(target=holder.keep, args=(options.connections, over))
            keeper.start()
            report(_times_line(f"{options.connections} opened in {took_s:.1f} s", honest(url, options.texts)))
            over.set()
            keeper.join()
            kept = _descriptors(server.pid)
            report(
                f"the server holds {kept} descriptors; {holder.again} of the connections were opened again"
            )
            holder.open(descriptors - options.connections + options.beyond)
            report(
                _times_line(
                    f"{descriptors + options.beyond} opened, limit of {descriptors} descriptors",
                    honest(url, options.texts),
                )
            )
            report(
                f"the server holds {_descriptors(server.pid)} descriptors, and {holder.held()} connections are left"
            )
        finally:
            server.terminate()
            server.wait()
    if options.json:
        print(json.dumps({"held": kept, "lines": lines}))
    raise SystemExit(kept < options.connections)


if __name__ == "__main__":
    run_bench(main)

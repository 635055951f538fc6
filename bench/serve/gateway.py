"""The gateway's CPU seconds for each streamed token, over those of a bare uvicorn application that sends the same bytes.

The engine costs nothing: it returns one token to each of 64 streams in a turn. Both servers are processes of their own, whose CPU time the kernel
counts; the client reads raw bytes. Rounds alternate between the two, and the median ratio counts.

    python -m bench.serve.gateway
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.running import record, run_bench

STREAMS, TOKENS = 64, 200
BODY = {"model": "free", "prompt": [1], "max_tokens": TOKENS, "stream": True, "seed": 0, "ignore_eos": True}


def gateway() -> ASGIApp:
    """Return the gateway over an engine that costs nothing."""
    from phalanx.data.tokenizers.tokenizer import BytesTokenizer
    from phalanx_serve.http.app import Gateway, application
    from phalanx_serve.http.limits import Limits
    from phalanx_serve.http.worker import EngineWorker, ModelIdentity
    from phalanx_serve.prompt import ModelText
    from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Token

    class Free:
        def __init__(self) -> None:
            self.left: dict[str, tuple[int, int]] = {}

        @property
        def busy(self) -> bool:
            return bool(self.left)

        def pages(self) -> tuple[int, int]:
            return 0, 0

        def drafts(self) -> tuple[int, int]:
            return 0, 0

        def submit(self, request: Request) -> None:
            self.left[request.id] = (0, request.max_tokens)

        def cancel(self, request_id: str) -> None:
            self.left.pop(request_id, None)

        def step(self) -> Sequence[EngineOutput]:
            # A turn of a real engine takes time too; without it, all of a text would be sent at once.
            time.sleep(0.002)
            outputs: list[EngineOutput] = []
            for name, (index, most) in list(self.left.items()):
                if index == most:
                    outputs.append(Ended(name, "length"))
                    del self.left[name]
                else:
                    outputs.append(Token(name, index, 97 + index % 26))
                    self.left[name] = (index + 1, most)
            return outputs

    text = ModelText("free", BytesTokenizer(), frozenset(), 256)
    # No request is refused for its predicted wait: a busy machine is slow, and the bench measures processor time.
    patient = Limits(wait_s=1e9)
    return application(
        Gateway(text, EngineWorker(Free(), ModelIdentity("0" * 16, "free", 4096)), None, patient)
    )


def bare(events: list[bytes]) -> ASGIApp:
    """Return an application that answers every request with these events, one message each."""
    import asyncio

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    return app


def serve(app: ASGIApp) -> None:
    """Serve at a free port, and print it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(256)
    print(sock.getsockname()[1], flush=True)
    config = uvicorn.Config(app, http="h11", ws="none", loop="asyncio", log_level="error", lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(port: int, streams: int) -> list[bytes]:
    """Send ``streams`` requests at once, and return their answers."""
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    chosen, answers = selectors.DefaultSelector(), dict[int, bytearray]()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + body)
        sock.setblocking(False)
        chosen.register(sock, selectors.EVENT_READ)
        answers[sock.fileno()] = bytearray()
    left = streams
    while left:
        for key, _ in chosen.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            got = sock.recv(1 << 16)
            answers[key.fd] += got
            if not got:
                chosen.unregister(sock)
                left -= 1
    return [bytes(answer) for answer in answers.values()]


def start(*words: str) -> tuple[subprocess.Popen[str], int]:
    """Start a server. Return its process and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.serve.gateway", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", choices=["gateway", "bare"])
    parser.add_argument("--events", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=STREAMS)
    chosen = parser.parse_args()
    streams = chosen.streams
    if chosen.serve == "gateway":
        serve(gateway())
        return
    if chosen.serve == "bare":
        serve(bare([event + b"\n\n" for event in chosen.events.read_bytes().split(b"\n\n") if event]))
        return
    import tempfile

    ours, port = start("--serve", "gateway")
    theirs = None
    try:
        (answer,) = load(port, 1)
        assert b"200 OK" in answer, answer
        lines = [line for line in answer.split(b"\r\n") if line.startswith(b"data: ")]
        events = b"".join(lines)
        assert events.endswith(b"data: [DONE]\n\n"), events[-100:]
        with tempfile.NamedTemporaryFile() as file:
            file.write(events)
            file.flush()
            theirs, bare_port = start("--serve", "bare", "--events", file.name)
        load(bare_port, 1)
        costs: list[tuple[float, float]] = []
        for _ in range(chosen.rounds):
            pair = []
            for process, where in ((ours, port), (theirs, bare_port)):
                before = cpu_s(process.pid)
                answers = load(where, streams)
                short = [answer for answer in answers if answer.count(b"data: ") != len(lines)]
                assert not short, short[0][:500]
                pair.append((cpu_s(process.pid) - before) / (streams * TOKENS))
            costs.append((pair[0], pair[1]))
            record({"cpu_s_per_token": pair[0], "of_uvicorn": pair[1]}, is_printed=False)
    finally:
        for server in (ours, theirs):
            if server is not None:
                server.kill()
                server.wait()
    ratio = statistics.median(a / max(b, 1e-9) for a, b in costs)  # a tick of the clock at least
    mine, base = (statistics.median(column) for column in zip(*costs, strict=True))
    print(
        f"CPU per token, {streams} streams: {mine * 1e6:.0f} us, bare uvicorn {base * 1e6:.0f} us: ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    run_bench(main)

"""The page on a real port, with readers that behave and readers that do not."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from observe.recorded import step
from phalanx.hardware.local.network import ListenError
from phalanx.observe.events import Event
from phalanx_watch.page.app import address, listen
from watch.made_runs import crashed, write_events


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of ``phalanx ui`` in a process of its own, and the folder of runs that it shows."""
    folder = tmp_path_factory.mktemp("runs")
    crashed(folder / "run")
    command = [sys.executable, "-m", "phalanx", "ui", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.match(r"http://127\.0\.0\.1:(\d+)/ ", process.stdout.readline())
        assert match
        yield int(match[1]), folder
        process.terminate()
        assert process.wait(120) in (0, -15, 143)


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def _run_id(port: int) -> str:
    run: str = json.loads(_get(port, "/api/runs")[1])["runs"][0]["id"]
    return run


def _listener(port: int, run: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/api/events?ids={run}")
    answer = connection.getresponse()
    answer.readline()  # it has begun
    return answer


def test_fifty_viewers_receive_a_new_step_beside_one_that_never_reads(served: tuple[int, Path]) -> None:
    port, folder = served
    run = _run_id(port)
    stalled = socket.create_connection(("127.0.0.1", port))
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.sendall(f"GET /api/events?ids={run} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    slow = socket.create_connection(("127.0.0.1", port))
    slow.sendall(b"GET /api/ru")  # and never the rest
    viewers = [_listener(port, run) for _ in range(50)]
    received: list[dict[str, object]] = []

    def listen_for_news(viewer: http.client.HTTPResponse) -> None:
        while not (line := viewer.readline()).startswith(b"data: ") or b'"heartbeat"' in line:
            assert line
        received.append(json.loads(line[6:]))

    threads = [threading.Thread(target=listen_for_news, args=(viewer,)) for viewer in viewers]
    for thread in threads:
        thread.start()
    number = 40
    while any(thread.is_alive() for thread in threads):  # content at the server's first look is no news
        number += 1
        write_events(folder / "run", [Event(1.9e9, 1, step(number, 10_000))])
        time.sleep(0.5)
    assert [news["kind"] for news in received] == ["changed"] * 50
    assert all(41 <= int(str(news["step"])) <= number for news in received)
    assert _get(port, f"/api/run/{run}/curves")[0] == 200
    for connection in (stalled, slow, *viewers):
        connection.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\r\n" * 1000,
        b"POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\nx",
    ],
)
def test_a_client_that_speaks_something_else_is_turned_away(
    served: tuple[int, Path], request_bytes: bytes
) -> None:
    port, _ = served
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        try:
            stranger.sendall(request_bytes)
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(4096)
        except OSError:  # it has hung up already
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 200")
    assert _get(port, "/api/runs")[0] == 200


def test_a_port_that_is_taken_is_named_and_the_usual_one_moves_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError, match=f"port {taken.getsockname()[1]}.*--port"):
            listen("127.0.0.1", taken.getsockname()[1])
    first, second = listen("127.0.0.1", None), listen("127.0.0.1", None)
    assert first.getsockname()[1] != second.getsockname()[1]
    first.close()
    second.close()


def test_the_address_that_is_printed_can_be_opened_elsewhere() -> None:
    assert address("127.0.0.1", 80, "") == "http://127.0.0.1:80/"
    assert address("::1", 80, "") == "http://[::1]:80/"
    assert address("0.0.0.0", 80, "t") == f"http://{socket.gethostname()}:80/?token=t"

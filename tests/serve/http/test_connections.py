"""More connections than the gateway may hold: idle ones give way, and if all have requests the others get an error."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.hardware.local.network import listen
from phalanx_serve.http.app import Gateway
from phalanx_serve.http.limits import Limits
from phalanx_serve.http.server import DrainingServer
from phalanx_serve.prompt import ModelText
from serve.http.test_limits import Immediate
from serve.workers.services import until

MOST = 4
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"


@contextmanager
def served(head_s: float = 60.0) -> Iterator[int]:
    """The port of a gateway that holds four connections."""
    with running(head_s) as (_, port):
        yield port


@contextmanager
def running(
    head_s: float = 60.0,
    tell: Callable[[str], None] = print,
    reader_s: float = 30.0,
    bodies_bytes: int = 1 << 30,
) -> Iterator[tuple[DrainingServer, int]]:
    """The server, and its port."""
    tokenizer = BytesTokenizer()
    text = ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size)
    gateway = Gateway(
        text,
        Immediate(),
        limits=Limits(connections=MOST, bodies_bytes=bodies_bytes),
        head_s=head_s,
        reader_s=reader_s,
    )
    server = DrainingServer(gateway, 0.0, tell)
    with closing(listen("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # unread bytes wait in the server
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield server, sock.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def connected(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(sent)
    return connection


def ask(connection: socket.socket, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of an answer."""
    kind = b"POST" if body else b"GET"
    head = b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % (kind, path.encode(), len(body)) + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(4096)
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = next(
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(rest) < length:
        rest += connection.recv(4096)
    return int(head.split()[1]), rest


def await_end(connection: socket.socket) -> None:
    """Wait until the server has ended the connection."""
    with suppress(ConnectionError):
        assert connection.recv(1) == b""


def is_open(connection: socket.socket) -> bool:
    """Return True if the server has not ended the connection so far."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


TEXT = json.dumps({"model": "run", "prompt": "a", "max_tokens": 1}).encode()


@pytest.mark.parametrize("first_bytes", [b"", b"GET /health HTTP/1.1\r\nHo"], ids=["silent", "half a head"])
def test_the_connection_that_has_been_idle_for_the_longest_time_gives_way(first_bytes: bytes) -> None:
    with served() as port, ExitStack() as stack:
        idle = [stack.enter_context(connected(port, first_bytes)) for _ in range(MOST)]
        used = stack.enter_context(connected(port))
        assert ask(used, "/v1/completions", TEXT)[0] == 200
        await_end(idle[0])
        assert all(map(is_open, idle[1:]))
        for _ in range(10 * MOST):  # a flood ends the other idle ones, and each time the one that came first
            stack.enter_context(connected(port))
        late = stack.enter_context(connected(port))
        assert ask(late, "/v1/completions", TEXT)[0] == 200
        await_end(used)


def test_if_all_connections_have_requests_others_get_an_error_and_health_is_answered() -> None:
    with served() as port, ExitStack() as stack:
        for _ in range(MOST):
            connection = stack.enter_context(connected(port, UNFINISHED))
            assert connection.recv(100).startswith(b"HTTP/1.1 100")  # the gateway waits for the body
        for _ in range(200):  # silent ones beyond the limit keep no other from its answer
            stack.enter_context(connected(port))
        for path, status in (("/health", 200), ("/ready", 200)):
            with connected(port) as connection:
                assert ask(connection, path)[0] == status
        with connected(port) as connection:
            status, body = ask(connection, "/v1/completions", TEXT)
            assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
            assert f"all {MOST} connections" in json.loads(body)["error"]["message"]
            assert connection.recv(1) == b""


def test_a_body_that_is_too_long_is_refused_with_a_message_even_if_much_of_it_is_still_to_come() -> None:
    with served() as port, connected(port) as connection:
        status, body = ask(connection, "/v1/completions", b" " * (24 << 20))
        assert (status, json.loads(body)["error"]["message"]) == (
            413,
            "the body is longer than 8388608 bytes",
        )
        assert ask(connection, "/v1/completions", TEXT)[0] == 200


def test_a_body_beyond_the_bytes_of_all_bodies_is_refused_until_another_request_ends() -> None:
    with running(bodies_bytes=len(TEXT) + 59) as (_, port):
        with connected(port, UNFINISHED) as unfinished, connected(port) as other:
            unfinished.sendall(b" " * 60)
            until(lambda: ask(other, "/v1/completions", TEXT)[0] == 503)
            status, body = ask(other, "/v1/completions", TEXT)
            assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        with connected(port) as other:
            until(lambda: ask(other, "/v1/completions", TEXT)[0] == 200)


MALFORMED = {
    "no HTTP": (b"\0\xff\r\n\r\n", 400, "illegal request line"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host: header"),
    "lengths": (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400, "bad Content-Length"),
    "a long head": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, 431, "Receive buffer too long"),
    "another coding": (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        501,
        "Only Transfer-Encoding: chunked is supported",
    ),
    "a body": (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
        400,
        "illegal chunk header",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused_in_the_same_form_as_others(name: str) -> None:
    sent, status, reason = MALFORMED[name]
    with running() as (server, port):
        with connected(port, sent) as connection:
            answer = b""
            while more := connection.recv(4096):
                answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\ncontent-type: application/json\r\n" in head.lower()
        error = json.loads(body)["error"]
        assert error["message"].startswith(f"what was sent is no HTTP request: {reason}")
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
        with connected(port) as connection:
            assert ask(connection, "/v1/completions", TEXT)[0] == 200
            assert f'status="{status}"' in ask(connection, "/metrics")[1].decode()
        assert not server.limiter.refused


def test_bytes_behind_a_body_with_two_ends_are_no_request() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with running() as (_, port), connected(port, head + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        answer = b""
        while more := client.recv(4096):
            answer += more
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"send one of them" in answer
        assert answer.count(b"HTTP/1.1 ") == 1


def test_malformed_bytes_behind_an_answer_end_the_connection_and_are_no_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running() as (_, port), connected(port, head) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"no length\r\n")
        while connection.recv(4096):
            pass
        with connected(port) as other:
            assert ask(other, "/health")[0] == 200
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_connection_without_a_whole_head_ends_after_a_while() -> None:
    with served(head_s=0.3) as port, connected(port) as silent, connected(port, b"GET /hea") as slow:
        for connection in (silent, slow):
            assert connection.recv(1) == b""


METRICS_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("requests", "times"),
    [
        ((METRICS_REQUEST + b"\r\n") * 40, {"reader_s": 0.2}),
        (METRICS_REQUEST + b"Connection: close\r\n\r\n", {"head_s": 0.2}),
    ],
    ids=["while more are to come", "the last one"],
)
def test_a_connection_whose_answers_are_left_unread_ends_after_a_while(
    requests: bytes, times: dict[str, float]
) -> None:
    with running(**times) as (server, port), ExitStack() as stack:  # type: ignore[arg-type]
        while not server.server_state.total_requests:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", port))
            with suppress(OSError):
                connection.sendall(requests)
            end = select.poll()
            end.register(connection, select.POLLRDHUP)
            # On a busy machine the head may come too late: it is sent again, over another connection.
            while not server.server_state.total_requests and not end.poll(10):
                pass
        while server.limiter.there:
            time.sleep(0.01)


def test_a_request_whose_body_has_not_come_when_the_server_ends_gets_an_error_and_is_no_defect() -> None:
    with running() as (server, port), connected(port, UNFINISHED) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        server.handle_exit(signal.SIGTERM, None)
        answer = connection.recv(4096)
        while more := connection.recv(4096):
            answer += more
    assert b" 503 " in answer
    assert b"about to end" in answer


def test_a_server_whose_messages_cannot_be_written_still_ends() -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with running(tell=full) as (server, port):
        with connected(port) as connection:
            assert ask(connection, "/health")[0] == 200
        server.handle_exit(signal.SIGTERM, None)
        while not server.should_exit:
            time.sleep(0.01)


def test_a_second_signal_ends_the_server_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (server, port):
        with connected(port) as connection:
            assert ask(connection, "/health")[0] == 200
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("allowed", "expected"), [(600, range(300, 345)), (100, range(1, 2))])
def test_the_limit_of_connections_is_that_of_open_files_less_a_reserve(allowed: int, expected: range) -> None:
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {allowed}))\n"
        "from phalanx_serve.http.limits import connections\n"
        "print(connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    connections, limit = map(int, printed.split())
    assert connections in expected
    assert limit == allowed

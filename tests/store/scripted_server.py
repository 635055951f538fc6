"""A server of a few lines in this process, of S3 and of Google: answers what a test tells it to, and else keeps objects, without any condition."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedServer(ThreadingHTTPServer):
    """``answers`` are given first, one to each request, as status and body; ``requests`` lists what was asked, ``conditions`` on what condition of Google's."""

    daemon_threads = True

    def __init__(
        self, answers: Sequence[tuple[int, bytes]] = (), forever: tuple[int, bytes] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.forever = forever
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.conditions: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.path.partition("?")[0]
        with self.server.lock:
            self.server.requests.append(f"{self.command} {key}")
            self.server.conditions.append(self.headers.get("x-goog-if-generation-match"))
            if self.server.answers:
                return self._send(*self.server.answers.pop(0))
            if self.server.forever:
                return self._send(*self.server.forever)
            if self.command == "PUT":
                self.server.objects[key] = body
                return self._send(200, b"")
            if self.command == "GET" and key in self.server.objects:
                return self._send(200, self.server.objects[key])
            return self._send(204 if self.command == "DELETE" else 404, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _respond  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@contextmanager
def scripted(
    answers: Sequence[tuple[int, bytes]] = (), forever: tuple[int, bytes] | None = None
) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answers, forever)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""The endpoint of one process of a fleet: exporter, server and the target's file, started and ended together.

Nothing of it is of consequence for the run. A port that is taken is no reason not to train: the next free one serves, and the target's file names it; where
none can be had, a line in the process's log has the reason.

Below: the HTTP server, and the targets' files.
"""

from __future__ import annotations

import json
import queue
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.observe.metrics.exporter import Collect, Exporter
from phalanx.observe.metrics.samples import OPEN_METRICS, TEXT, Labels
from phalanx.process.this_process import RESERVE
from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.peers import split_target
from phalanx.run.spec import ObserveSpec

# A small HTTP server for metrics on threads of its own, with bounds on the cost of every client.
#
# It answers GET and HEAD of a few fixed paths, one request per connection. It bounds the number of connections (``_THREADS``
# are served, ``_MOST_READY`` and ``_MOST_SILENT`` wait), the bytes of a request, and the seconds of a request and of its
# response. After each connection it pauses, so that thousands of requests a second cannot keep the interpreter's lock from the
# other threads of the process. ``http.server`` bounds only the time between two bytes.

_THREADS = 4
_WAITING = 128
_MOST_SILENT = RESERVE // 2
"""Most connections without a request yet; of more, the oldest are closed."""
_MOST_READY = RESERVE // 4
"""Most connections that wait for a thread; a further one is closed. With the silent ones, they stay within the descriptors that a
coordinator keeps beside its agents."""
_LOOK_S = 0.5
_MOST_REQUEST_BYTES = 16 << 10
_REQUEST_S, _ANSWER_S = 2.0, 10.0
_PAUSE_S = 0.02


class HttpResponse(NamedTuple):
    """The response of a path."""

    body: bytes
    content_type: str = "application/json; charset=utf-8"
    status: str = "200 OK"
    zipped: bool = False
    """The body is compressed by gzip already."""


Headers = Mapping[str, str]
Page = Callable[[Headers], HttpResponse]


def metrics_page(exporter: Exporter) -> Page:
    """Return the page ``/metrics``: OpenMetrics for clients that accept it, else the text format; compressed for those that accept
    gzip."""

    def page(headers: Headers) -> HttpResponse:
        open_metrics = "application/openmetrics-text" in headers.get("accept", "")
        zipped = "gzip" in headers.get("accept-encoding", "")
        text = exporter.text(open_metrics=open_metrics, zipped=zipped)
        return HttpResponse(text, OPEN_METRICS if open_metrics else TEXT, zipped=zipped)

    return page


def json_page(content: Callable[[], object]) -> Page:
    """A page of JSON, made at each request."""
    return lambda _headers: HttpResponse(json.dumps(content()).encode())


class MetricsServer:
    """Serves pages until it is closed."""

    def __init__(
        self, pages: Mapping[str, Page], host: str, port: int, *, request_timeout_s: float = _REQUEST_S
    ) -> None:
        """Listen at ``host`` and ``port`` (0: a free one), and serve ``pages`` by path on threads of this process.

        A connection whose request is not complete after ``request_timeout_s`` is closed. Raises ``OSError`` if it
        cannot listen.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._pages, self._request_timeout_s = pages, request_timeout_s
        self._socket = socket.create_server((host, port), family=family, backlog=_WAITING)
        self._socket.setblocking(False)  # a client may leave between select and accept
        self.port: int = self._socket.getsockname()[1]
        self._closing = False
        self._ready: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._accept, name="metrics-http-accept", daemon=True),
            *(
                threading.Thread(target=self._serve, name=f"metrics-http-{number}", daemon=True)
                for number in range(_THREADS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening; an answer that is under way is finished."""
        self._closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes those who wait in accept
        self._socket.close()

    def _accept(self) -> None:
        """Accept connections, and queue each for the serving threads once its client sends something. Runs in a
        thread.

        Silent ones are closed after ``request_timeout_s``, or the oldest beyond ``_MOST_SILENT``: they delay no
        other client. While ``_MOST_READY`` are queued, further ones are closed.
        """
        silent: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(_LOOK_S):
                    if key.fileobj is self._socket:
                        self._take(selector, silent)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    del silent[key.fileobj]
                    if self._ready.qsize() < _MOST_READY:
                        self._ready.put(key.fileobj)
                    else:
                        key.fileobj.close()
                # In the order in which they came: the first of them are the oldest.
                latest_s = time.monotonic() - self._request_timeout_s
                late = [connection for connection, since_s in silent.items() if since_s < latest_s]
                for connection in late or list(silent)[: max(0, len(silent) - _MOST_SILENT)]:
                    selector.unregister(connection)
                    del silent[connection]
                    connection.close()
            for connection in silent:
                connection.close()
        for _ in range(_THREADS):
            self._ready.put(None)

    def _take(self, selector: selectors.BaseSelector, silent: dict[socket.socket, float]) -> None:
        """Accept a connection and watch it as silent. After an error, which is dropped, pause."""
        try:
            connection, _ = self._socket.accept()
        except OSError:  # closed, or no descriptor is left for now
            time.sleep(_PAUSE_S)
            return
        silent[connection] = time.monotonic()
        selector.register(connection, selectors.EVENT_READ)

    def _serve(self) -> None:
        while (connection := self._ready.get()) is not None:
            with connection, suppress(OSError, ValueError):
                self._converse(connection)
            time.sleep(_PAUSE_S)

    def _converse(self, connection: socket.socket) -> None:
        """Read one request and send its answer. Raises ``OSError`` or ``ValueError`` for a client that is late, malformed or gone."""
        method, path, headers = _request(connection, self._request_timeout_s)
        answer = self._answer(method, path, headers)
        body = answer.body
        head = [
            f"HTTP/1.1 {answer.status}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(body)}",
            *(["Content-Encoding: gzip"] if answer.zipped else []),
            *("Cache-Control: no-store", "X-Content-Type-Options: nosniff", "Connection: close", "", ""),
        ]
        _send(connection, "\r\n".join(head).encode() + (b"" if method == "HEAD" else body))

    def _answer(self, method: str, path: str, headers: Headers) -> HttpResponse:
        """Return the page at ``path``; status 405 for other methods than GET and HEAD, 404 for other paths, 500 if
        the page raises.
        """
        if method not in ("GET", "HEAD"):
            return _plain("405 Method Not Allowed", "only GET and HEAD")
        page = self._pages.get(path)
        if page is None:
            return _plain("404 Not Found", f"there is: {', '.join(self._pages)}")
        try:
            return page(headers)
        except Exception as error:
            return _plain("500 Internal Server Error", f"{type(error).__name__}: {error}")


def _plain(status: str, text: str) -> HttpResponse:
    return HttpResponse(f"{text}\n".encode(), "text/plain; charset=utf-8", status)


def _request(connection: socket.socket, timeout_s: float) -> tuple[str, str, Headers]:
    """Return method, path without query, and headers (names and values in lower case).

    Raises ``ValueError`` if malformed, too long or late, and ``OSError``, also on a timeout.
    """
    deadline_s, data = time.monotonic() + timeout_s, b""
    while b"\r\n\r\n" not in data:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(data) > _MOST_REQUEST_BYTES:
            raise ValueError("too slow or too long")
        connection.settimeout(left_s)
        block = connection.recv(4096)
        if not block:
            raise ValueError("ended before its time")
        data += block
    first, *lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ")
    pairs: Sequence[tuple[str, str, str]] = [line.partition(":") for line in lines]
    _, path = split_target(target.partition("?")[0])
    return method, path, {n.strip().lower(): v.strip().lower() for n, _, v in pairs}


def _send(connection: socket.socket, data: bytes) -> None:
    """Send all of ``data`` within ``_ANSWER_S``, then close the sending half and wait 0.2 s for the client's end.
    Raises ``OSError`` if the client does not take it.
    """
    deadline_s, view = time.monotonic() + _ANSWER_S, memoryview(data)
    while view:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        view = view[connection.send(view[: 1 << 18]) :]
    connection.settimeout(0.2)
    with suppress(OSError):  # unread bytes of the client would make the kernel drop the response
        connection.shutdown(socket.SHUT_WR)
        connection.recv(4096)


AGENTS = 64
"""An agent takes the first free port of so many after the coordinator's; one alone on its machine always has the first."""


class Endpoint:
    """The endpoint of a coordinator, or of an agent."""

    def __init__(
        self,
        directory: RunDirectory,
        observe: ObserveSpec,
        attempt: int,
        node: str,
        host: str,
        log: Callable[[str], None],
    ) -> None:
        """Set up the endpoint; nothing listens yet.

        ``node`` is empty for the coordinator, ``host`` is this machine as others reach it, and ``log`` takes lines
        for people.
        """
        self._directory, self._observe, self._attempt = directory, observe, attempt
        self._node, self._host, self._log = node, host, log
        self._bound = observe.metrics_host.strip("[]")
        self.run = directory.path.resolve().name
        self.labels = Labels(run=self.run, node=node)
        self._open: tuple[Exporter, MetricsServer] | None = None
        self._target: Target | None = None
        self._lock, self._closed = threading.Lock(), False

    def start(self, sources: Mapping[str, Collect]) -> None:
        """Begin to serve, if the run file enables it; on a thread, since the run directory's disk may be slow."""
        if self._observe.metrics_port:
            threading.Thread(target=self._start, args=(sources,), name="metrics-start", daemon=True).start()

    def _start(self, sources: Mapping[str, Collect]) -> None:
        """Serve the metrics of ``sources`` (for the coordinator also /targets), log the address and write the
        target file.

        Does nothing once closed. If no port is free, that is logged and nothing is served.
        """
        with self._lock:
            if self._closed:
                return
            exporter = Exporter(sources, self.labels, self._log)
            pages = {"/metrics": metrics_page(exporter)}
            if not self._node:
                pages["/targets"] = json_page(lambda: targets([self._directory.path]))
            server = self._listening(pages)
            if server is None:
                exporter.close()
                return
            self._open = (exporter, server)
            anywhere = self._bound in ("0.0.0.0", "::", "")
            address = f"{_in_url(self._host if anywhere else self._bound)}:{server.port}"
            self._log(f"metrics at http://{address}/metrics")
            self._announce(Target(address, self.run, self._node, self._attempt))

    def _announce(self, target: Target) -> None:
        """Write the target file; the coordinator first removes those of earlier starts. An ``OSError`` is logged."""
        try:
            if not self._node:
                withdraw_earlier(self._directory, self._attempt)
            announce(self._directory, target)
            self._target = target
        except OSError as error:
            self._log(f"cannot write where its metrics are: {error}")

    def close(self) -> None:
        """Stop serving, and remove the target file."""
        with self._lock:
            self._closed = True
            if self._target is not None:
                withdraw(self._directory, self._target)
            if self._open is not None:
                exporter, server = self._open
                server.close()
                exporter.close()

    def _listening(self, pages: Mapping[str, Page]) -> MetricsServer | None:
        """Return a server on the first free port: that of the run file, for agents the range after it, else any.

        If none is free, log the first error and return ``None``.
        """
        first = self._observe.metrics_port
        own = range(first + 1, first + 1 + AGENTS) if self._node else (first,)
        trouble = ""
        for port in chain((port for port in own if port < 1 << 16), (0,)):
            try:
                return MetricsServer(pages, self._bound, port)
            except OSError as error:
                trouble = trouble or str(error)
        self._log(f"no metrics: cannot listen on {self._bound}: {trouble}; see observe.metrics_host")
        return None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# Addresses of a run's endpoints: one small file for each in the run directory, in the format of Prometheus' file service
# discovery.
#
# The listening process writes ``RUN/targets/NAME.json`` and removes it at an orderly end. If it is killed, the file stays, and
# Prometheus correctly reports the target as down. So ``file_sd_configs`` can read the folders of any number of runs directly.
# The coordinator and ``phalanx ui`` serve the same lists over HTTP.


COORDINATOR = "coordinator"
_ATTEMPT = "__meta_phalanx_attempt"
_MOST_BYTES = 1 << 16


class TargetGroup(msgspec.Struct):
    """Addresses with the same labels, in the form of Prometheus' service discovery."""

    targets: list[str]
    labels: dict[str, str]


@dataclass(frozen=True)
class Target:
    """One endpoint."""

    address: str
    """ "host:port"."""
    run: str
    node: str
    """Empty for the coordinator."""
    attempt: int

    @property
    def entry(self) -> TargetGroup:
        """In the form of Prometheus' service discovery. A label that begins with ``__meta_`` is dropped by Prometheus itself."""
        labels = {"run": self.run, **({"node": self.node} if self.node else {}), _ATTEMPT: str(self.attempt)}
        return TargetGroup([self.address], labels)


def _path(directory: RunDirectory, name: str) -> Path:
    # A node's name may be any word; a file's may not.
    plain = re.sub(r"[^\w.-]", "_", name)
    return directory.targets / f"{plain}.json"


def announce(directory: RunDirectory, target: Target) -> None:
    """Write the target's file, for Prometheus. Raises ``OSError``."""
    directory.targets.mkdir(parents=True, exist_ok=True)
    content = json.dumps([msgspec.to_builtins(target.entry)], indent=1) + "\n"
    write_atomically(_path(directory, target.node or COORDINATOR), content.encode())


def withdraw(directory: RunDirectory, target: Target) -> None:
    """Remove the target's file, unless another process has taken its name since. Errors are ignored."""
    path = _path(directory, target.node or COORDINATOR)
    with suppress(OSError):
        if _entries(path) == [target.entry]:
            path.unlink()


def withdraw_earlier(directory: RunDirectory, attempt: int) -> None:
    """Remove the target files of starts before ``attempt``. Raises ``OSError``."""
    for path in sorted(directory.targets.glob("*.json")):
        for entry in _entries(path):
            before = entry.labels.get(_ATTEMPT, "")
            if before.isdecimal() and int(before) < attempt:
                path.unlink(missing_ok=True)


def targets(directories: Iterable[Path]) -> list[Mapping[str, object]]:
    """All targets of runs, as Prometheus' HTTP service discovery takes them."""
    folders = (RunDirectory(path).targets for path in directories)
    paths = (path for folder in folders for path in sorted(folder.glob("*.json")))
    return [msgspec.to_builtins(entry) for path in paths for entry in _entries(path)]


def coordinator_address(directory: RunDirectory) -> str:
    """Return the address ("host:port") at which the run's coordinator serves its metrics; empty if none is announced."""
    for entry in _entries(_path(directory, COORDINATOR)):
        if entry.targets:
            return entry.targets[0]
    return ""


def _entries(path: Path) -> list[TargetGroup]:
    """Return the entries of one target file; none of a file that is not one of ours."""
    try:
        return msgspec.json.decode(read_small(path, _MOST_BYTES), type=list[TargetGroup])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []

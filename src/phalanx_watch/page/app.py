"""Application and server of ``phalanx ui``: routes, their views, and uvicorn at a free address until Ctrl-C.

Everything is read from run directories at the time of the request. Nothing is written to a run directory or locked in
it. Views are plain functions that run in threads, so that a slow disk delays no other request.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import webbrowser
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.hardware.local import network
from phalanx.hardware.local.network import ListenError, is_private
from phalanx.observe.metrics.endpoint import targets
from phalanx.observe.metrics.exporter import Exporter
from phalanx.observe.metrics.samples import OPEN_METRICS, TEXT, Labels
from phalanx.process.this_process import host_name
from phalanx_watch.lookout import Lookout
from phalanx_watch.page import view_run
from phalanx_watch.page.export import ExportError, exported
from phalanx_watch.page.http import (
    Access,
    Guard,
    PageRequestError,
    Parameters,
    access_for,
    json_answer,
    new_token,
    not_found,
)
from phalanx_watch.page.live import LiveUpdates
from phalanx_watch.page.runs import PageRuns, RunPlace
from phalanx_watch.page.view_curves import compare_view, curves_view, layers_view
from phalanx_watch.page.view_fleet import fleet_view, goodput_view
from phalanx_watch.page.view_ranks import profile_view, profiles_view, rank_view, ranks_view, trace_file
from phalanx_watch.runs.index import RunIndex, found_in

# Responses to simultaneous requests are computed once: fifty open pages of one run cost little more than one.
#
# A response is cached for a second, or until its run changes. A request during the computation waits for it.

KEPT_S = 1.0
_MOST_BYTES = 64 << 20


class KeptAnswers:
    """Cache of the responses of the last second, by request. For one event loop."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        """Begin with an empty cache, whose entries are valid for ``kept_s`` seconds."""
        self._kept_s = kept_s
        self._made: OrderedDict[str, tuple[float, Response]] = OrderedDict()
        self._making: dict[str, asyncio.Task[Response]] = {}
        self._changes: Counter[str] = Counter()
        self._nbytes = 0

    def changed(self, run: str) -> None:
        """Invalidate the cached responses of a run."""
        self._changes[run] += 1

    async def get(self, run: str, question: str, make: Callable[[], Response]) -> Response:
        """Return the response to a request about a run, cached until the run changes or the entry is old; ``make`` computes it, in
        a thread.

        Concurrent requests share one computation. Raises the errors of ``make``.
        """
        key = f"{self._changes[run]} {question}"
        kept = self._made.get(key)
        if kept is not None and time.monotonic() - kept[0] < self._kept_s:
            return kept[1]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._make(key, make))
        return await asyncio.shield(making)  # a canceled request must not cancel the others

    async def _make(self, key: str, make: Callable[[], Response]) -> Response:
        """Compute a response in a thread and cache it; drop entries older than twice ``kept_s``, and the oldest
        beyond ``_MOST_BYTES``.
        """
        try:
            answer = await to_thread.run_sync(make)
        finally:
            del self._making[key]
        self._forget(key)
        self._made[key] = time.monotonic(), answer
        self._nbytes += len(answer.body)
        while self._made and (
            self._nbytes > _MOST_BYTES
            or (time.monotonic() - next(iter(self._made.values()))[0] > 2 * self._kept_s)
        ):
            self._forget(next(iter(self._made)))
        return answer

    def _forget(self, key: str) -> None:
        """Drop a response, if it is cached, and its bytes from the sum."""
        kept = self._made.pop(key, None)
        self._nbytes -= len(kept[1].body) if kept is not None else 0


# ``/metrics`` and ``/targets`` of ``phalanx ui``: all runs that it shows, for a Prometheus server elsewhere.


class MetricsOfRuns:
    """Metrics endpoints of the runs below some folders. Nothing is read before the first request."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._exporter: Exporter | None = None
        self._lock = threading.Lock()

    async def text(self, request: Request) -> Response:
        """Return the metrics for Prometheus, as OpenMetrics if the client accepts it, and gzipped if it accepts that."""
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        zipped = "gzip" in request.headers.get("accept-encoding", "")

        def make() -> bytes:
            return self._made().text(open_metrics=open_metrics, zipped=zipped)

        headers = {"Content-Encoding": "gzip"} if zipped else {}
        body = await to_thread.run_sync(make)
        return Response(body, headers=headers, media_type=OPEN_METRICS if open_metrics else TEXT)

    async def targets(self, _request: Request) -> Response:
        """Return the metrics endpoints of these runs' own processes, for Prometheus' HTTP service discovery."""
        return json_answer(await to_thread.run_sync(lambda: targets(found_in(self._folders))))

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if self._exporter is not None:
                self._exporter.close()

    def _made(self) -> Exporter:
        """Return the exporter of all runs, which the first call starts."""
        with self._lock:
            if self._exporter is None:
                lookout = Lookout(RunIndex(self._folders).rows)
                self._exporter = Exporter({"runs": lookout.samples}, Labels(node=host_name()))
            return self._exporter


STATIC = Path(__file__).parent / "static"
_MOST_WATCHED = 500
View = Callable[[PageRuns, RunPlace, Parameters], object]
ListView = Callable[[PageRuns, Parameters], object]
"""View of several runs."""


def application(runs: PageRuns, access: Access, kept_s: float = KEPT_S) -> ASGIApp:
    """Return the ASGI application over ``runs`` for clients that ``access`` admits; responses are cached for
    ``kept_s`` seconds.

    While it runs, viewers' runs are polled, and a change drops their cached responses. Errors become JSON.
    """
    kept = KeptAnswers(kept_s)
    live = LiveUpdates(runs.news, lambda place: kept.changed(place.id))
    metrics = MetricsOfRuns(runs.folders)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        """Poll viewers' runs while the application runs; at its end, stop that and close the metrics."""
        watching = asyncio.create_task(live.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            metrics.close()

    routes = [
        Route("/", _index),
        Route("/api/runs", partial(_list, runs, kept, view_run.runs_view)),
        Route("/api/settings", partial(_list, runs, kept, view_run.settings_view)),
        Route("/api/compare", partial(_list, runs, kept, compare_view)),
        Route("/api/events", partial(_events, runs, live)),
        Route("/metrics", metrics.text),
        Route("/targets", metrics.targets),
        Route("/api/run/{id}/profile/{name}/trace", partial(_trace, runs)),
        Route("/export/{id}.html", partial(_export, runs)),
        *(
            Route(f"/api/run/{{id}}{path}", partial(_view, runs, kept, view))
            for path, view in _views().items()
        ),
        Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={PageRequestError: _explain, HTTPException: _explain, Exception: _apologize},
    )
    return Guard(app, access)


def _views() -> dict[str, View]:
    """Return the views of a run by the path below it."""
    return {
        "": view_run.summary,
        "/curves": curves_view,
        "/goodput": goodput_view,
        "/fleet": fleet_view,
        "/checkpoints": view_run.checkpoints_view,
        "/samples": view_run.samples_view,
        "/ranks": ranks_view,
        "/layers": layers_view,
        "/rank/{rank:int}": rank_view,
        "/logs": view_run.logs_view,
        "/why": view_run.why_view,
        "/profiles": profiles_view,
        "/profile/{name}": profile_view,
    }


async def _index(_request: Request) -> Response:
    """Return the page's HTML. Raises ``PageRequestError`` if the installation lacks it."""
    if not (STATIC / "index.html").is_file():
        raise not_found(f"{STATIC} has no index.html: this installation is incomplete; install Phalanx again")
    return FileResponse(STATIC / "index.html", media_type="text/html")


async def _list(runs: PageRuns, kept: KeptAnswers, view: ListView, request: Request) -> Response:
    """Return a view of all runs, cached by path and query."""

    def make() -> Response:
        return json_answer(view(runs, Parameters(request.query_params)))

    return await kept.get("", f"{request.url.path}?{request.url.query}", make)


async def _view(runs: PageRuns, kept: KeptAnswers, view: View, request: Request) -> Response:
    """Return the response of a view of a run, from the cache if possible."""
    run = str(request.path_params["id"])

    def make() -> Response:
        content = view(runs, runs.place(run), Parameters(request.query_params, request.path_params))
        return content if isinstance(content, Response) else json_answer(content)

    return await kept.get(run, f"{request.url.path}?{request.url.query}", make)


async def _trace(runs: PageRuns, request: Request) -> Response:
    """Return a profile's trace file as a download, streamed because it may be long. Raises ``PageRequestError`` if there is none."""

    def find() -> Path:
        return trace_file(runs.place(request.path_params["id"]), request.path_params["name"])

    path = await to_thread.run_sync(find)
    name = f"{request.path_params['name']}.json.gz"
    return FileResponse(path, media_type="application/gzip", filename=name)


async def _export(runs: PageRuns, request: Request) -> Response:
    """Return the page of one run as a file to download. Its own content policy, stricter than the page's, applies
    in it. Raises ``PageRequestError``."""
    place = await to_thread.run_sync(runs.place, request.path_params["id"])
    try:
        content = await to_thread.run_sync(exported, runs, place)
    except ExportError as error:
        raise PageRequestError(str(error), 500) from error
    headers = {
        "Content-Disposition": f'attachment; filename="{place.id}.html"',
        "Content-Security-Policy": "sandbox",
    }
    return Response(content, media_type="text/html", headers=headers)


async def _events(runs: PageRuns, live: LiveUpdates, request: Request) -> Response:
    """Return a stream of notifications of the runs in ``ids``. Raises ``PageRequestError`` (503) if there are too many viewers."""
    if live.full:
        raise PageRequestError("there are as many viewers as one server has: close a page, or wait", 503)
    identifiers = Parameters(request.query_params).names("ids", most=_MOST_WATCHED)
    places = await to_thread.run_sync(runs.watched, identifiers, _MOST_WATCHED)
    return _Stream(live, places)


class _Stream(Response):
    """Response that lasts as long as its viewer."""

    def __init__(self, live: LiveUpdates, places: list[RunPlace]) -> None:
        super().__init__()
        self._live, self._places = live, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await self._live.serve(self._places, receive, send)


async def _explain(_request: Request, error: Exception) -> Response:
    """Return an error as JSON with its status."""
    if isinstance(error, PageRequestError):
        return json_answer({"error": str(error)}, error.status)
    assert isinstance(error, HTTPException)
    return json_answer({"error": error.detail}, error.status_code)


async def _apologize(_request: Request, error: Exception) -> Response:
    """Return an unexpected error as JSON with status 500, cut at 500 characters."""
    return json_answer(
        {"error": f"a defect of phalanx ui, which the run does not notice: {error!r}"[:500]}, 500
    )


# The server.


USUAL_PORT = 7425
_TRIES = 20
_BEHIND_RUNS = 5
"""Niceness of the server: a run on the same machine has priority."""
_MOST_CONNECTIONS = 1024


def serve(
    folders: Sequence[Path],
    host: str,
    port: int | None,
    *,
    demand_token: bool,
    open_page: bool | None,
    tell: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C; ``tell`` receives its address. Lowers this process's priority and reads runs ahead
    on a thread.

    A token is required if ``demand_token``, or at an address that others can reach. A browser is opened if
    ``open_page``, or by None if there is one. ``port`` is that of ``listen``. Raises ``ListenError``.
    """
    token = new_token() if demand_token or not is_private(host) else ""
    sock = listen(host, port)
    url = address(host, sock.getsockname()[1], token)
    runs = PageRuns(folders)
    os.nice(_BEHIND_RUNS)
    count = len(runs.places())
    tell(
        f"{url}  ({count} run{'s' * (count != 1)} in {', '.join(map(str, folders))}; Ctrl-C ends the page, never a run)"
    )
    if open_page or (open_page is None and _has_browser()):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    over = threading.Event()
    threading.Thread(target=runs.read_ahead, args=(over.is_set,), daemon=True).start()
    try:
        uvicorn_of(runs, host, token).run(sockets=[sock])
    finally:
        over.set()


def uvicorn_of(runs: PageRuns, host: str, token: str) -> uvicorn.Server:
    """Return a server of the page, without a socket."""
    config = uvicorn.Config(
        application(runs, access_for(host, token)),
        http="h11",
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at ``port``; if None, at the default port or the next free one of ``_TRIES``.

    Raises ``ListenError``.
    """
    first, last = (USUAL_PORT, USUAL_PORT + _TRIES - 1) if port is None else (port, port)
    for candidate in range(first, last):
        try:
            return network.listen(host, candidate)
        except ListenError as error:
            if not error.is_taken:
                raise
    return network.listen(host, last)


def address(host: str, port: int, token: str) -> str:
    """Return the page's URL. A wildcard address is replaced by the machine's name."""
    name = host_name() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _has_browser() -> bool:
    """Return True on a terminal of a machine with a display, not over SSH."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))

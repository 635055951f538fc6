"""Runs the page's application with uvicorn, at an address that is free, until Ctrl-C."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from phalanx.hardware.local import network
from phalanx.hardware.local.network import ListenError, is_private
from phalanx.watch.page.app import application
from phalanx.watch.page.guard import access_for, new_token
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.series.stored import StoredSeries, default_folder

USUAL_PORT = 7425
_TRIES = 20
_BEHIND_RUNS = 5
"""The server's niceness: a run on the same machine goes first."""
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
    """Serves the page until Ctrl-C; ``tell`` is given its address. Raises ``ListenError``."""
    token = new_token() if demand_token or not is_private(host) else ""
    sock = listen(host, port)
    url = address(host, sock.getsockname()[1], token)
    runs = Runs(folders, stored=StoredSeries(default_folder()))
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


def uvicorn_of(runs: Runs, host: str, token: str) -> uvicorn.Server:
    """A server of the page, that is given its socket."""
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
    """A socket that listens at ``port``; at the usual one or one after it if that is ``None``. Raises ``ListenError``."""
    first, last = (USUAL_PORT, USUAL_PORT + _TRIES - 1) if port is None else (port, port)
    for candidate in range(first, last):
        try:
            return network.listen(host, candidate)
        except ListenError as error:
            if not error.is_taken:
                raise
    return network.listen(host, last)


def address(host: str, port: int, token: str) -> str:
    """The page's URL; of an address that means all of them, the machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _has_browser() -> bool:
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))

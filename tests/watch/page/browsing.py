"""A server of the page, and a page of a browser whose console and requests are watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from phalanx_watch.page.app import listen, uvicorn_of
from phalanx_watch.page.runs import PageRuns

if TYPE_CHECKING:
    from playwright.sync_api import Page


CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 100_000
"""The patience that a busy machine needs: Chromium waits for two still frames before it clicks."""
HOSTILE_NAME = "<img src=x onerror=window.hacked=1>"  # a run's name has no slash
HOSTILE = f"<script>window.hacked=1</script>{HOSTILE_NAME}"


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[int]:
    """Serve the page over ``folder`` in a thread; yields the port."""
    sock = listen("127.0.0.1", port)
    server = uvicorn_of(PageRuns([folder]), "127.0.0.1", "")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@dataclass
class Watched:
    """A page, the lines of its console, and the addresses that it requested."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listeners: dict[Any, Callable[[Any], None]] = {
            "console": lambda message: self.console.append(message.text),
            "pageerror": lambda error: self.console.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def hosts(self) -> set[str | None]:
        """Hosts of the requests, except those for parts of the page itself."""
        return {urlsplit(url).hostname for url in self.requests if not url.startswith(("data:", "blob:"))}

    def leave(self) -> None:
        """Leave the page empty, without stored settings."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.unroute_all()
        self.page.evaluate("() => { try { localStorage.clear(); sessionStorage.clear(); } catch {} }")
        self.page.goto("about:blank")


Open = Callable[..., Watched]


def id_of(page: Page, name: str) -> str:
    """The identifier of the run called ``name``."""
    rows = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["runs"]
    return next(row["id"] for row in rows if row["name"] == name)


def go(page: Page, name: str, view: str = "", query: str = "") -> None:
    """Go to a view of the run called ``name``."""
    page.evaluate("(hash) => { location.hash = hash; }", f"#/run/{id_of(page, name)}{view}{query}")

"""The endpoint of one process of a fleet: exporter, server and the target's file, started and ended together.

Nothing of it is of consequence for the run. A port that is taken is no reason not to train: the next free one serves, and the target's file says which; where
none can be had, a line in the process's log says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import chain

from phalanx.observe.metrics.exporter import Collect, Exporter
from phalanx.observe.metrics.samples import Labels
from phalanx.observe.metrics.server import MetricsServer, Page, json_page, metrics_page
from phalanx.observe.metrics.targets import Target, announce, targets, withdraw, withdraw_earlier
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ObserveSpec

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
        """``node`` is empty for the coordinator; ``host`` is this machine, as others reach it."""
        self._directory, self._observe, self._attempt = directory, observe, attempt
        self._node, self._host, self._log = node, host, log
        self._bound = observe.metrics_host.strip("[]")
        self.run = directory.path.resolve().name
        self.labels = Labels(run=self.run, node=node)
        self._open: tuple[Exporter, MetricsServer] | None = None
        self._target: Target | None = None
        self._lock, self._closed = threading.Lock(), False

    def start(self, sources: Mapping[str, Collect]) -> None:
        """Begins to serve, if the run file asks for it; on a thread, since the run directory's disk may be slow."""
        if self._observe.metrics_port:
            threading.Thread(target=self._start, args=(sources,), name="metrics-start", daemon=True).start()

    def _start(self, sources: Mapping[str, Collect]) -> None:
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
        try:
            if not self._node:
                withdraw_earlier(self._directory, self._attempt)
            announce(self._directory, target)
            self._target = target
        except OSError as error:
            self._log(f"cannot write where its metrics are: {error}")

    def close(self) -> None:
        """Ends it, and takes its target back."""
        with self._lock:
            self._closed = True
            if self._target is not None:
                withdraw(self._directory, self._target)
            if self._open is not None:
                exporter, server = self._open
                server.close()
                exporter.close()

    def _listening(self, pages: Mapping[str, Page]) -> MetricsServer | None:
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

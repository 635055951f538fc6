"""``/metrics`` and ``/targets`` of ``phalanx ui``: all runs that it shows, for a Prometheus that watches them from outside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from phalanx.observe.metrics.exporter import Exporter
from phalanx.observe.metrics.exposition import OPEN_METRICS, TEXT
from phalanx.observe.metrics.samples import Labels
from phalanx.observe.metrics.targets import targets
from phalanx.watch.metrics.lookout import Lookout
from phalanx.watch.page.answer import json_answer
from phalanx.watch.runs.index import RunIndex, found_in


class MetricsOfRuns:
    """Serves the metrics of the runs below some folders; nothing is looked at before somebody asks."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._exporter: Exporter | None = None
        self._lock = threading.Lock()

    async def text(self, request: Request) -> Response:
        """The text for Prometheus: OpenMetrics for who asks for it."""
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        zipped = "gzip" in request.headers.get("accept-encoding", "")

        def make() -> bytes:
            return self._made().text(open_metrics=open_metrics, zipped=zipped)

        headers = {"Content-Encoding": "gzip"} if zipped else {}
        body = await to_thread.run_sync(make)
        return Response(body, headers=headers, media_type=OPEN_METRICS if open_metrics else TEXT)

    async def targets(self, _request: Request) -> Response:
        """The endpoints of these runs' own processes, in the form of Prometheus' HTTP service discovery."""
        return json_answer(await to_thread.run_sync(lambda: targets(found_in(self._folders))))

    def close(self) -> None:
        """Ends the threads of the sources."""
        with self._lock:
            if self._exporter is not None:
                self._exporter.close()

    def _made(self) -> Exporter:
        with self._lock:
            if self._exporter is None:
                lookout = Lookout(RunIndex(self._folders).rows)
                self._exporter = Exporter({"runs": lookout.samples}, Labels(node=socket.gethostname()))
            return self._exporter

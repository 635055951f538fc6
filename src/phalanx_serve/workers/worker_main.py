"""Process of a serving worker: connects to the router, opens the model, and works until it is dismissed.

``python -m phalanx_serve.workers.worker_main`` reads its task, with the token, as JSON from standard input, so that
neither command line nor environment shows the token. It ends with the process that started it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.process.child import die_with_parent
from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import WireError
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Role
from phalanx_serve.workers import messages as m
from phalanx_serve.workers.page_client import PageWay

if TYPE_CHECKING:
    from phalanx_serve.workers.serving_worker import ServingWorker

_CONNECT_S = 20.0


class WorkerTask(Struct, frozen=True):
    """Model, role and router address of a worker process."""

    host: str
    port: int
    """Port of the router."""
    token: str
    number: int
    role: Role
    served: ServedRun
    page_host: str = "127.0.0.1"
    """Address at which other workers reach its page port."""
    pages: PageWay = "auto"
    """Transport of pages from other workers."""


def main() -> None:
    """Run the worker process by the task on standard input; exit with code 1 and a message if it ends for an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that serves
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerTask)
    die_with_parent()
    try:
        reason = work(task)
    except (WireError, OSError) as error:
        reason = str(error) or type(error).__name__
    if reason:
        print(f"worker {task.number}: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if reason else 0)  # threads that read or pull need not be waited for


def work(task: WorkerTask) -> str:
    """Serve as one worker.

    Return the reason why it ended, empty if nothing is wrong. Raises WireError if there is no router. The router
    receives the reason too if the worker cannot serve.
    """
    with socket.create_connection((task.host, task.port), _CONNECT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = sealed(connection, "the router", task.token, "client", m.PURPOSE, _CONNECT_S)
        link.send_message(m.Opening(task.number, os.getpid()))
        try:
            return _serve(task, link)
        except Exception as error:
            link.send_message(m.WorkerUnable(_reason(error)[:8000]))
            return _reason(error)


def _reason(error: Exception) -> str:
    """Return an error's message; one that is not expected is called a defect."""
    from phalanx.data.errors import TokenizerError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx_serve.traffic.events import PartLostError, ServeError

    expected_errors = (
        CheckpointError,
        TokenizerError,
        RunDirectoryError,
        ServeError,
        PartLostError,
        OSError,
    )
    return str(error) if isinstance(error, expected_errors) else f"a defect: {error!r}"


def _serve(task: WorkerTask, link: SealedConnection) -> str:
    """Open the engine, measure its rate, offer its pages, and work until the end; return the reason. Raises ServeError."""
    from phalanx_serve.engine.engine import Engine
    from phalanx_serve.served.of_run import open_engine
    from phalanx_serve.served.opened import device_of
    from phalanx_serve.traffic.events import ServeError, WorkerIdentity
    from phalanx_serve.workers.over_nixl.agent_process import AgentProcess
    from phalanx_serve.workers.page_server import PageServer
    from phalanx_serve.workers.serving_worker import ServingWorker, measured_rate

    nixl = AgentProcess() if task.pages == "nixl" else None  # before the model, which takes longer
    device = device_of(task.served, task.number)
    opened = open_engine(msgspec.structs.replace(task.served, device=str(device)))
    engine = opened.engine
    if not isinstance(engine, Engine):
        raise ServeError(
            "a model of your own (model.factory) keeps no keys and values, so workers have nothing to share: "
            "serve it without --workers"
        )
    _, pages = engine.pages()
    context = min(opened.identity.context, engine.context)
    rows = max(1, min(task.served.rows, 256, context - 1))
    rate = measured_rate(engine, rows)
    nbytes = engine.page_bytes
    identity = WorkerIdentity(
        opened.identity.weights_sha, opened.identity.numerics_id, f"{engine.root.hex()[:16]}-{nbytes}"
    )
    worker = ServingWorker(
        engine, identity, nbytes, task.token, link, opened.streaming, opened.trouble, task.pages, nixl
    )
    signal.signal(signal.SIGTERM, _Leaving(worker))
    server = PageServer(worker.offered, identity, task.token, task.page_host, nixl=nixl)
    try:
        door = m.PageDoor(task.page_host, server.port)
        bits = opened.identity.bits
        ready = m.WorkerReady(identity, task.role, engine.root, context, pages, nbytes, rate, door, bits)
        link.send_message(ready)
        return worker.run()
    finally:
        server.close()


class _Leaving:
    """SIGTERM handler: the first signal moves the worker's requests elsewhere, a second one ends it at once."""

    def __init__(self, worker: ServingWorker) -> None:
        self._worker, self._is_leaving = worker, False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        """Leave on the first signal, end at once on the second."""
        if self._is_leaving:
            os._exit(1)
        self._is_leaving = True
        self._worker.leave()


if __name__ == "__main__":
    main()

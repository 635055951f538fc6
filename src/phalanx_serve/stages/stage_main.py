"""The process of a stage that a server has started on its machine; it ends with the connection.

``python -m phalanx_serve.stages.stage_main`` reads where to connect, and the token, as JSON from standard input, so that neither command line nor
environment shows it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.process.child import die_with_parent
from phalanx.wire.messages import WireError
from phalanx_serve.stages.messages import PROOF_S, StageLink

_WAIT_S = 600.0
_AGAIN_S = 0.5


class StageTask(Struct, frozen=True):
    """Whose stage a process is."""

    host: str
    port: int
    token: str
    number: int


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that serves
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=StageTask)
    die_with_parent()
    try:
        why = join(task, None)
    except (WireError, OSError) as error:
        why = str(error) or type(error).__name__
    if why:
        print(f"stage {task.number}: {why}", file=sys.stderr, flush=True)
    os._exit(1 if why else 0)


def join(task: StageTask, run_dir: Path | None) -> str:
    """Is a stage of the server that listens there until it ends; why it could not be one, empty if it could. Raises OSError and
    WireError if there is no such server."""
    from phalanx_serve.stages.far_part import run_stage

    with _connected(task.host, task.port) as connection:
        link = StageLink(connection, task.token, "client", f"{task.host}:{task.port}")
        return run_stage(link, task.number, os.getpid(), run_dir)


def _connected(host: str, port: int) -> socket.socket:
    """A connection to the server, which may be started later than its stages."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), PROOF_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main()

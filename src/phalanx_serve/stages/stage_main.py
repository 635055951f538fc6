"""Process of a stage that a server started on its machine; it ends with the connection.

``python -m phalanx_serve.stages.stage_main`` reads the address and the token as JSON from standard input, so that
neither command line nor environment shows them.
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

from phalanx.hardware.local.network import dial
from phalanx.process.child import die_with_parent
from phalanx.wire.messages import WireError
from phalanx_serve.stages.messages import PROOF_S, StageLink

_WAIT_S = 600.0
_AGAIN_S = 0.5


class StageTask(Struct, frozen=True):
    """Address, token and number of a stage process."""

    host: str
    port: int
    token: str
    number: int


def main() -> None:
    """Run the stage process by the task on standard input, until the server ends; exit with code 1 and a message for an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that serves
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=StageTask)
    die_with_parent()
    try:
        reason = join(task, None)
    except (WireError, OSError) as error:
        reason = str(error) or type(error).__name__
    if reason:
        print(f"stage {task.number}: {reason}", file=sys.stderr, flush=True)
    os._exit(1 if reason else 0)


def join(task: StageTask, run_dir: Path | None) -> str:
    """Run a stage of the server until the server ends. Return why that failed, or an empty string. Raises OSError
    and WireError if there is no such server.
    """
    from phalanx_serve.stages.far_part import run_stage

    with _connected(task.host, task.port) as connection:
        link = StageLink(connection, task.token, "client", f"{task.host}:{task.port}")
        return run_stage(link, task.number, os.getpid(), run_dir)


def _connected(host: str, port: int) -> socket.socket:
    """Connect to the server, which may start after its stages. Raises OSError; ConnectionRefusedError only after some seconds."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return dial(host, port, PROOF_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main()

"""Connections between a server and its stages, from both sides. Each stage proves that it knows the token.

Stages are processes that the server starts on its machine, or that join from others.
``python -m phalanx_serve.stages.door`` is one that a server started. It reads the address and the token as JSON from standard input, so
that neither command line nor environment shows them, and ends with the connection.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec
from msgspec import Struct

from phalanx.hardware.local.network import dial, join_address
from phalanx.process.child import Child, describe_exit, die_with_parent, end_all
from phalanx.run.directory.files import read_named
from phalanx.run.peers import AddressError, read_host, read_port
from phalanx.wire.messages import WireError
from phalanx.wire.port import Doorway, Newcomer
from phalanx_serve.stages import messages as m
from phalanx_serve.stages.messages import PROOF_S, StageLink
from phalanx_serve.traffic.events import ServeError

# The process of a stage.


_WAIT_S = 600.0
_AGAIN_S = 0.5


class StageTask(Struct, frozen=True):
    """Address, token and number of a stage process."""

    host: str
    port: int
    token: str
    number: int


def main() -> None:
    """Run the stage process by the task on standard input, until the server ends; exit with code 1 and a message for
    an error.

    Ignores SIGINT, and dies with its parent.
    """
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
    """Run a stage of the server until the server ends. Return the reason if it could not, else an empty string.

    ``run_dir`` is the run here; None means the server's path. Raises OSError and WireError if there is no such
    server.
    """
    from phalanx_serve.stages.far_part import run_stage

    with _connected(task.host, task.port) as connection:
        link = StageLink(connection, task.token, "client", f"{task.host}:{task.port}")
        return run_stage(link, task.number, os.getpid(), run_dir)


def _connected(host: str, port: int) -> socket.socket:
    """Connect to the server, which may start after its stages: tries again for ``_WAIT_S`` while it is refused. Raises OSError."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return dial(host, port, PROOF_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN_S)


# The server.


BEGIN_S = 600.0
_COMMAND = (sys.executable, "-P", "-m", "phalanx_serve.stages.door")
_LOOK_S = 0.05
_MOST_PROVING = 64
"""Most connections that authenticate at a time; a further one closes the oldest."""
_SHORTEST_TOKEN = 16
_log = logging.getLogger(__name__)


class PartNotOpenedError(ServeError):
    """A stage could not open its part of the model. The message names the stage and the reason."""


@dataclass
class Door:
    """Listener for stages, and the stage processes that were started here."""

    listener: socket.socket
    token: str
    children: list[Child] = field(default_factory=list)
    proof_timeout_s: float = PROOF_S
    """Time limit for a connection to prove the token."""

    def admit(self, count: int) -> list[StageLink]:
        """Return the connections of ``count`` stages; those started here come in their order.

        Stages that leave again are replaced by later ones. Closes the listener. Raises ServeError if they do not
        connect in time, or a process started here ends before.
        """
        end = time.monotonic() + BEGIN_S
        arrivals: SimpleQueue[tuple[int, StageLink]] = SimpleQueue()
        joined: list[tuple[int, StageLink]] = []
        doorway = Doorway(_MOST_PROVING)
        self.listener.settimeout(_LOOK_S)
        while len(joined) < count:
            ended = [code for child in self.children if (code := child.exit_code()) is not None]
            if ended:
                raise ServeError(f"a stage's process {describe_exit(ended[0])} before it connected")
            if time.monotonic() > end:
                raise ServeError(f"{len(joined)} of {count} stages have joined within {BEGIN_S:g} s")
            with suppress(TimeoutError):
                connection, address = self.listener.accept()
                newcomer = doorway.enter(connection, address[0])
                # In a thread each, so that a silent peer delays no stage.
                peer = join_address(*address[:2])
                Thread(target=self._prove, args=(newcomer, peer, arrivals, doorway), daemon=True).start()
            while len(joined) < count and not arrivals.empty():
                joined.append(arrivals.get())
            for departed in [stage for stage in joined if stage[1].ended()]:
                _log.warning("the stage at %s has left again before all were there", departed[1].peer)
                joined.remove(departed)
        self.listener.close()
        return [link for _, link in sorted(joined, key=lambda pair: pair[0])]

    def _prove(
        self,
        newcomer: Newcomer,
        peer: str,
        arrivals: SimpleQueue[tuple[int, StageLink]],
        doorway: Doorway,
    ) -> None:
        """Check a connection's proof, and queue (stage number, link); the number is -1 for a stage of another
        machine.

        A stranger is logged and closed.
        """
        connection = newcomer.connection
        try:
            link = StageLink(connection, self.token, "server", peer, proof_timeout_s=self.proof_timeout_s)
            doorway.leave(newcomer, proven=True)
            message = link.receive(m.FROM_STAGE)
        except (WireError, OSError) as error:
            _log.warning("the connection from %s is no stage of this server: %s", peer, error)
            doorway.leave(newcomer, proven=False)
            connection.close()
            return
        arrivals.put((message.number if isinstance(message, m.Here) else -1, link))

    def close(self) -> None:
        """End the processes that were started here."""
        self.listener.close()
        end_all(self.children)


def start_stages(count: int, environment: Mapping[str, str]) -> Door:
    """Start ``count`` processes on this machine, which will connect over loopback with a new token.

    ``environment`` is added to this process's own. Returns the door at which they are admitted.
    """
    door = Door(_listen("127.0.0.1", 0), secrets.token_hex(16))
    host, port = door.listener.getsockname()[:2]
    for number in range(1, count + 1):
        task = msgspec.json.encode(StageTask(host, port, door.token, number))
        door.children.append(Child.start(_COMMAND, os.environ | environment, task=task))
    return door


def await_stages(at: str, token_file: Path, count: int, tell: Callable[[str], None]) -> Door:
    """Listen at ``at`` (HOST:PORT) for ``count`` stages that join with the token in ``token_file``.

    Reports the command to join by ``tell``, and returns before they have come. Raises ServeError for the address or
    the token.
    """
    door = Door(_listen(*address(at, "--stages-at")), read_token(token_file))
    host, port = door.listener.getsockname()[:2]
    tell(
        f"waiting for {count} stages at {host}:{port}: phalanx serve RUN_DIR --join HOST:{port} --token-file FILE"
    )
    return door


def address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises ServeError."""
    host, _, port = text.rpartition(":")
    try:
        return read_host(host), read_port(port)
    except AddressError as error:
        raise ServeError(f"{option} {text}: {error}; give HOST:PORT, as 10.0.0.5:7070") from error


def read_token(file: Path) -> str:
    """Read the token that stages and server share, without surrounding white space.

    Raises ServeError for a file that others can read or that cannot be read, or a token that is too short.
    """
    try:
        mode, text = file.stat().st_mode, read_named(file).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"--token-file {file}: {getattr(error, 'strerror', None) or error}") from error
    if mode & 0o077:
        raise ServeError(f"--token-file {file}: others may read it; chmod 600 {file}")
    if len(text) < _SHORTEST_TOKEN:
        raise ServeError(
            f"--token-file {file}: holds {len(text)} characters, which others might guess; write {_SHORTEST_TOKEN} random ones at least, as by "
            "openssl rand -hex 16"
        )
    return text


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises ServeError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ServeError(f"cannot listen at {host}, port {port} (--stages-at): {error.strerror}") from error


def opened_stages(links: Sequence[StageLink]) -> list[m.StageReady]:
    """Wait, without limit, for each stage's ``StageReady`` message, and return them in order.

    Raises PartNotOpenedError with the reason of the first stage that fails, and ServeError for another message.
    """
    ready = []
    for number, link in enumerate(links, 1):
        try:
            message = link.receive(m.FROM_STAGE, math.inf)  # weights may be long in coming
        except (WireError, OSError) as error:
            raise PartNotOpenedError(
                f"stage {number} ({link.peer}) ended while it opened its layers: {error}"
            ) from error
        if isinstance(message, m.StageUnable):
            raise PartNotOpenedError(f"stage {number} ({link.peer}): {message.reason}")
        if not isinstance(message, m.StageReady):
            raise ServeError(f"stage {number} ({link.peer}) sent an unknown message")
        ready.append(message)
    return ready


if __name__ == "__main__":
    main()

"""How a server comes by its stages: processes that it starts on its machine, or that join it from others; each proves that it knows the token."""

from __future__ import annotations

import logging
import math
import os
import secrets
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

from phalanx.hardware.local.network import join_address
from phalanx.process.child import Child, describe_exit, end_all
from phalanx.run.peers import AddressError, read_host, read_port
from phalanx.wire.messages import WireError
from phalanx.wire.port import Doorway, Newcomer
from phalanx_serve.stages import messages as m
from phalanx_serve.stages.messages import PROOF_S, StageLink
from phalanx_serve.stages.stage_main import StageTask
from phalanx_serve.traffic.events import EngineError

BEGIN_S = 600.0
_COMMAND = (sys.executable, "-P", "-m", "phalanx_serve.stages.stage_main")
_LOOK_S = 0.05
_MOST_PROVING = 64
"""Connections that may be proving at a time that they are of stages; a further one ends the oldest."""
_SHORTEST_TOKEN = 16
_log = logging.getLogger(__name__)


class PartNotOpenedError(EngineError):
    """A stage could not open its part of the model; the message says which and why."""


@dataclass
class Door:
    """Where stages connect, and the processes among them that were started here."""

    listener: socket.socket
    token: str
    children: list[Child] = field(default_factory=list)
    proof_timeout_s: float = PROOF_S
    """Limit of the proof of a connection."""

    def admit(self, count: int) -> list[StageLink]:
        """The connections of ``count`` stages, those started here in their order. Raises EngineError where they do not come."""
        end = time.monotonic() + BEGIN_S
        came: SimpleQueue[tuple[int, StageLink]] = SimpleQueue()
        found: list[tuple[int, StageLink]] = []
        doorway = Doorway(_MOST_PROVING)
        self.listener.settimeout(_LOOK_S)
        while len(found) < count:
            ended = [code for child in self.children if (code := child.exit_code()) is not None]
            if ended:
                raise EngineError(f"a stage's process {describe_exit(ended[0])} before it connected")
            if time.monotonic() > end:
                raise EngineError(f"{len(found)} of {count} stages have joined within {BEGIN_S:g} s")
            with suppress(TimeoutError):
                connection, address = self.listener.accept()
                newcomer = doorway.enter(connection, address[0])
                # Each by itself: whoever says nothing keeps no stage waiting.
                peer = join_address(*address[:2])
                Thread(target=self._prove, args=(newcomer, peer, came, doorway), daemon=True).start()
            while len(found) < count and not came.empty():
                found.append(came.get())
            for gone in [one for one in found if one[1].ended()]:
                _log.warning("the stage at %s has left again before all were there", gone[1].peer)
                found.remove(gone)
        self.listener.close()
        return [link for _, link in sorted(found, key=lambda pair: pair[0])]

    def _prove(
        self,
        newcomer: Newcomer,
        peer: str,
        came: SimpleQueue[tuple[int, StageLink]],
        doorway: Doorway,
    ) -> None:
        connection = newcomer.connection
        try:
            link = StageLink(connection, self.token, "server", peer, proof_timeout_s=self.proof_timeout_s)
            doorway.leave(newcomer, proven=True)
            here = link.receive(m.FROM_STAGE)
        except (WireError, OSError) as error:
            _log.warning("whoever connected from %s is no stage of this server: %s", peer, error)
            doorway.leave(newcomer, proven=False)
            connection.close()
            return
        came.put((here.number if isinstance(here, m.Here) else -1, link))

    def close(self) -> None:
        """Ends the processes that were started here."""
        self.listener.close()
        end_all(self.children)


def start_stages(count: int, environment: Mapping[str, str]) -> Door:
    """Starts ``count`` processes on this machine, which will connect, with ``environment`` besides this process's own."""
    door = Door(_listen("127.0.0.1", 0), secrets.token_hex(16))
    host, port = door.listener.getsockname()[:2]
    for number in range(1, count + 1):
        task = msgspec.json.encode(StageTask(host, port, door.token, number))
        door.children.append(Child.start(_COMMAND, os.environ | environment, task=task))
    return door


def await_stages(at: str, token_file: Path, count: int, tell: Callable[[str], None]) -> Door:
    """Listens at ``at`` (HOST:PORT) for ``count`` stages that join with the token in ``token_file``. Raises EngineError."""
    door = Door(_listen(*address(at, "--stages-at")), read_token(token_file))
    host, port = door.listener.getsockname()[:2]
    tell(
        f"waiting for {count} stages at {host}:{port}: phalanx serve RUN_DIR --join HOST:{port} --token-file FILE"
    )
    return door


def address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises EngineError."""
    host, _, port = text.rpartition(":")
    try:
        return read_host(host), read_port(port)
    except AddressError as error:
        raise EngineError(f"{option} {text}: {error}; give HOST:PORT, as 10.0.0.5:7070") from error


def read_token(file: Path) -> str:
    """The token that stages and server share. Raises EngineError for one that others may read, or guess."""
    try:
        mode, text = file.stat().st_mode, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"--token-file {file}: {getattr(error, 'strerror', None) or error}") from error
    if mode & 0o077:
        raise EngineError(f"--token-file {file}: others may read it; chmod 600 {file}")
    if len(text) < _SHORTEST_TOKEN:
        raise EngineError(
            f"--token-file {file}: holds {len(text)} characters, which others might guess; write {_SHORTEST_TOKEN} random ones at least, as by "
            "openssl rand -hex 16"
        )
    return text


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise EngineError(f"cannot listen at {host}, port {port} (--stages-at): {error.strerror}") from error


def opened_stages(links: Sequence[StageLink]) -> list[m.Ready]:
    """What each process says once its part is open. Raises PartNotOpenedError with the reason of the first that cannot."""
    ready = []
    for number, link in enumerate(links, 1):
        try:
            said = link.receive(m.FROM_STAGE, math.inf)  # weights may be long in coming
        except (WireError, OSError) as error:
            raise PartNotOpenedError(
                f"stage {number} ({link.peer}) ended while it opened its layers: {error}"
            ) from error
        if isinstance(said, m.Unable):
            raise PartNotOpenedError(f"stage {number} ({link.peer}): {said.why}")
        if not isinstance(said, m.Ready):
            raise EngineError(f"stage {number} ({link.peer}) says what nobody understands")
        ready.append(said)
    return ready

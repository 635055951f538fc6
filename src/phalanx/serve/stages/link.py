"""A connection between two processes that have layers of one model: sealed messages, and behind them raw numbers in sealed pieces.

Whoever sits in between can read states and pages, and cut the connection, but cannot change a bit (``phalanx.serve.workers.sealed_wire``). A machine that
vanishes is noticed by the kernel, which asks an idle connection for a sign of life, within half a minute. A process that stands still is not: its kernel
answers for it. So a stage says that it is alive, in a thread of its own, and whoever hears nothing of it for long gives it up.
"""

from __future__ import annotations

import fcntl
import select
import socket
import termios
import time
from contextlib import suppress
from threading import Event, Lock, Thread

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.wire import Wire, WireError, secured_client, secured_server
from phalanx.run.peers.token_proof import Role
from phalanx.serve.stages import messages as m
from phalanx.serve.workers.sealed_wire import SealedWire

PROOF_S = 20.0
LONGEST_STEP_S = 600.0
"""How long a stage that says that it is alive may owe an answer."""
_PIECE_BYTES = 8 << 20
_CLOSED = getattr(select, "POLLRDHUP", 0)
"""The other side says nothing any more; where a system has no such event, it tells POLLHUP."""
_BEATS = 8
"""Signs of life in the time after which a stage without any is given up."""
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


class SilentError(WireError):
    """The other side is connected and does nothing."""


class StageLink:
    """One end of a connection after the proof; heard by one thread, but for ``ended``. Methods raise WireError where it breaks."""

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        role: Role,
        peer: str,
        *,
        proof_timeout_s: float = PROOF_S,
    ) -> None:
        """Proves to each other, within ``proof_timeout_s``, that both know ``token``. Raises RefusedError and WireError."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        secured = (
            secured_client(connection, None, "") if role == "client" else secured_server(connection, None)
        )
        wire = Wire(secured, peer, then="")
        wire.set_deadline(proof_timeout_s)
        self._connection = secured
        self._sealed = SealedWire(wire, token, role, m.PURPOSE)
        self._saying, self._silence_s, self._heard = Lock(), 0.0, time.monotonic()
        wire.set_timeout(None)  # a step may take long, and between two there may be hours

    def expect_life(self, silence_s: float) -> None:
        """From now on the other side says ``Alive`` (``keep_alive``): methods raise SilentError if nothing comes for so long."""
        self._silence_s, self._heard = silence_s, time.monotonic()
        self._sealed.raw.set_timeout(silence_s)

    def keep_alive(self, silence_s: float) -> Event:
        """Says ``Alive`` often enough for whoever expects it within ``silence_s``, until the connection or the returned event ends it."""
        over = Event()

        def beat() -> None:
            with suppress(CheckpointError):
                while not over.wait(silence_s / _BEATS):
                    self.say(m.Alive())

        Thread(target=beat, name="alive", daemon=True).start()
        return over

    @property
    def peer(self) -> str:
        """Who is at the other end, for people."""
        return self._sealed.peer

    def say(self, message: m.FromStage | m.ToStage, body: memoryview | bytes = b"") -> None:
        """Sends a message and the raw bytes that it announces; from any thread."""
        view = memoryview(body)
        with self._saying:
            try:
                self._sealed.send(m.encode(message))
                for begin in range(0, len(view), _PIECE_BYTES):
                    self._sealed.send(bytes(view[begin : begin + _PIECE_BYTES]))
            except WireError as error:
                raise self._explained(error) from error

    def hear(self, longest_s: float = LONGEST_STEP_S) -> bytes:
        """The next message, encoded; of a stage, the next that is no sign of life. Raises SilentError if there are only such for so long."""
        begun = time.monotonic()
        while True:
            found = self._received()
            if found != _SIGN:
                return found
            # This process may have stood still itself: then the answer is there already, behind signs of life.
            if time.monotonic() - begun > longest_s and not self._readable():
                raise SilentError(
                    f"it has owed an answer for {longest_s:g} s, though it says that it is alive"
                )

    def body(self, nbytes: int) -> bytearray:
        """The raw bytes that the last message has announced."""
        found = bytearray()
        while len(found) < nbytes:
            found += self._received()
        return found

    def look(self) -> bytes | None:
        """Hears signs of life while nothing is asked; a message that is none, if there is one."""
        now = time.monotonic()  # before it is looked, since this process may stand still in between
        while self._readable():
            if (found := self._received()) != _SIGN:
                return found
        if self._silence_s and now - self._heard > self._silence_s:
            raise self._silent()
        return None

    def _received(self) -> bytes:
        try:
            found = self._sealed.receive()
        except WireError as error:
            raise self._explained(error) from error
        self._heard = time.monotonic()
        return found

    def _explained(self, error: WireError) -> WireError:
        return self._silent() if isinstance(error.__cause__, TimeoutError) else error

    def _silent(self) -> SilentError:
        return SilentError(
            f"it has given no sign of life for {self._silence_s:g} s (--stage-timeout): its process is stopped, its machine stands still, or "
            "the network swallows what it says; see to it, then start the server again"
        )

    def ended(self) -> bool:
        """Whether the other side is gone, also while nobody says anything; from any thread. It never waits: what can be read may be another thread's."""
        try:
            over = self._polled(_CLOSED) & (_CLOSED | select.POLLHUP | select.POLLERR)
            # What it said before it left is heard first: that may be the reason.
            return bool(over) and not fcntl.ioctl(self._connection, termios.FIONREAD, bytes(4)).strip(b"\0")
        except (OSError, ValueError):
            return True

    def _readable(self) -> bool:
        return bool(self._polled(select.POLLIN))

    def _polled(self, events: int) -> int:
        """Which of some events have happened, or that the connection is none any more."""
        poll = select.poll()
        poll.register(self._connection, events)
        found = poll.poll(0)
        return found[0][1] if found else 0

    def close(self) -> None:
        """Ends the connection, for a thread that listens at this moment too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._sealed.raw.close()


_SIGN = m.encode(m.Alive())

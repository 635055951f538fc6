"""Messages between the processes of a divided model, msgpack of tagged structs; and the authenticated connection that
carries them.

A stage connects, proves that it knows the service's token, and sends ``Here``. It receives ``StageRefused``, or the
layers in ``OpenStage``, and sends ``StageReady`` or ``StageUnable``. From then on it answers requests in order. Keys
and values have numbers: a *piece* is a running text's, a *place* a page's. States and pages follow their message as
raw numbers, in sealed frames.

A man in the middle can read states and pages and cut the connection, but cannot change a bit (``phalanx.wire``). TCP
keep-alive detects a lost machine within half a minute, but not a stopped process, whose kernel still answers. So each
stage sends heartbeats from a thread of its own, and counts as lost after ``silence_s`` without one.
"""

from __future__ import annotations

import fcntl
import select
import socket
import termios
import time
from contextlib import suppress
from threading import Event, Thread
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from phalanx.wire.connection import sealed
from phalanx.wire.messages import EndedError, MessageDecoder, Role, SilentError, WireError, encode
from phalanx.wire.port import shut
from phalanx_serve.engine.model_runner import FarSpan
from phalanx_serve.engine.sampler import SampledToken, SamplingRequest
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import PartLostError

PURPOSE = "phalanx serving stage, version 5"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Text = Annotated[str, Meta(max_length=8192)]


class _Message(Struct, frozen=True, tag=True):
    pass


class Digest(Struct, frozen=True):
    """A ``phalanx.checkpoint.committed.digest.TensorDigest``."""

    dtype: str
    shape: tuple[Count, ...]
    sha256: bytes


class Here(_Message, frozen=True):
    """A process that can take layers. ``number`` is its index among those that the service started, -1 if it
    joined by itself.
    """

    number: int
    pid: Count


class StageReady(_Message, frozen=True, tag="Ready"):
    """The layers are in memory."""

    digests: dict[str, Digest]
    """Digests of the layers' weights, by name."""
    checkpoint: str
    """Name of the full checkpoint that the layers are part of (``phalanx_serve.stages.shares.checkpoint_name``)."""
    numerics_id: str


class StageHeartbeat(_Message, frozen=True, tag="Alive"):
    """Heartbeat of a stage. May come between any other messages, and answers none."""


class PagesAllocated(_Message, frozen=True, tag="Held"):
    """The pages are allocated."""


class StageUnable(_Message, frozen=True, tag="Unable"):
    """The stage cannot open its layers, or has lost keys and values, and ends."""

    reason: Text = field(name="why")


class Passed(_Message, frozen=True):
    """The step's rows are computed. Their states follow, or the last stage's sampler output."""

    nbytes: Count
    readings: tuple[SampledToken, ...] = ()


class SharePiece(_Message, frozen=True, tag="Piece"):
    """This share's result in a layer follows."""

    nbytes: Count


class Page(_Message, frozen=True):
    """The requested page follows."""

    nbytes: Count


class Failed(_Message, frozen=True):
    """A step failed by a defect; keys and values are unchanged."""

    reason: Text = field(name="why")


class OpenStage(_Message, frozen=True, tag="Open"):
    """Load these layers of a run's model."""

    served: ServedRun
    step: Count
    stage: Count
    begin: Count
    end: Count
    """Layers from ``begin`` up to ``end``."""
    shares: Count = 1
    """If above 1, the process has share ``stage`` of each layer."""


class StageRefused(_Message, frozen=True, tag="Refused"):
    """The process cannot be a stage of this server, and ends."""

    reason: Text = field(name="why")


class Hold(_Message, frozen=True):
    """Allocate this number of pages."""

    pages: Count


class Drop(_Message, frozen=True):
    """Free a text's keys and values."""

    piece: Count


class CopyIn(_Message, frozen=True):
    """Load the page at ``place`` as page ``number`` of a text."""

    piece: Count
    number: Count
    place: Count


class CopyOut(_Message, frozen=True):
    """Store page ``number`` of a text at ``place``."""

    piece: Count
    number: Count
    place: Count


Errand = Drop | CopyIn | CopyOut


class Compute(_Message, frozen=True):
    """Compute the following rows through the layers, after ``errands``."""

    errands: tuple[Errand, ...]
    spans: tuple[FarSpan, ...]
    length: Count
    asks: tuple[SamplingRequest, ...]
    nbytes: Count


class Whole(_Message, frozen=True):
    """The gathered result of all shares follows; answers ``SharePiece``."""

    nbytes: Count


class ReadPage(_Message, frozen=True):
    """Send the page at ``place``, after ``errands``."""

    errands: tuple[Errand, ...]
    place: Count


class WritePage(_Message, frozen=True):
    """Store the following page at ``place``, after ``errands``. There is no answer."""

    errands: tuple[Errand, ...]
    place: Count
    nbytes: Count


FromStage = (
    Here | StageReady | StageHeartbeat | PagesAllocated | StageUnable | Passed | SharePiece | Page | Failed
)
ToStage = OpenStage | StageRefused | Hold | Compute | Whole | ReadPage | WritePage
FROM_STAGE: MessageDecoder[FromStage] = MessageDecoder(FromStage)
TO_STAGE: MessageDecoder[ToStage] = MessageDecoder(ToStage)


# Connection.


PROOF_S = 20.0
LONGEST_STEP_S = 600.0
"""Most seconds without an answer from a stage that sends heartbeats."""
_CLOSED = getattr(select, "POLLRDHUP", 0)
"""The peer has stopped sending. A system without this event reports POLLHUP."""
_BEATS = 8
"""Heartbeats per silence timeout."""
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))
_HEARTBEAT = encode(StageHeartbeat())
_T = TypeVar("_T")


class StageLink:
    """One end of a connection after the proof; received from by one thread, but for ``ended``. Methods raise WireError if it breaks."""

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        role: Role,
        peer: str,
        *,
        proof_timeout_s: float = PROOF_S,
    ) -> None:
        """Prove to each other, within ``proof_timeout_s``, that both ends know ``token``. Raises UnprovenError and
        WireError.

        TCP probes keep the connection alive, and reads have no timeout until ``expect_life``.
        """
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        # Without a timeout: a step may take long, and between two there may be hours.
        self._connection = sealed(connection, peer, token, role, PURPOSE, proof_timeout_s)
        self._silence_s, self._received_s = 0.0, time.monotonic()

    def expect_life(self, silence_s: float) -> None:
        """Expect the peer's heartbeats (``keep_alive``) from now on: methods raise SilentError if nothing arrives for so long."""
        self._silence_s, self._received_s = silence_s, time.monotonic()
        self._connection.raw.set_timeout(silence_s)

    def keep_alive(self, silence_s: float) -> Event:
        """Send heartbeats in a thread, ``_BEATS`` in each ``silence_s``, until the connection ends or the returned event is set."""
        over = Event()

        def beat() -> None:
            """Send a heartbeat ``_BEATS`` times per silence, until the end or the link's loss."""
            with suppress(WireError):
                while not over.wait(silence_s / _BEATS):
                    self.send(StageHeartbeat())

        Thread(target=beat, name="alive", daemon=True).start()
        return over

    @property
    def peer(self) -> str:
        """The other end, for people."""
        return self._connection.peer

    def send(self, message: FromStage | ToStage, body: memoryview | bytes = b"") -> None:
        """Send a message and the raw bytes that it announces; from any thread.

        Raises SilentError with the allowed silence, and WireError.
        """
        try:
            self._connection.send_message(message, body)
        except SilentError as error:
            raise self._silent() from error

    def receive(self, decoder: MessageDecoder[_T], longest_s: float = LONGEST_STEP_S) -> _T:
        """Return the next message that is no heartbeat.

        Raises SilentError if there are only heartbeats for ``longest_s``, or not even those for the silence of
        ``expect_life``. Raises WireError if the connection ends.
        """
        begin_s = time.monotonic()
        while (body := self._receive()) == _HEARTBEAT:
            # This process may have been stopped itself: then the answer has arrived already, behind heartbeats.
            if time.monotonic() - begin_s > longest_s and not self._readable():
                raise SilentError(f"it has owed an answer for {longest_s:g} s, though it sends heartbeats")
        return decoder.decode(body)

    def receive_body(self, nbytes: int) -> bytearray:
        """Return the raw bytes that the last message announced, and record the time for ``look``. Raises SilentError and WireError."""
        try:
            body = self._connection.receive_body(nbytes)
        except SilentError as error:
            raise self._silent() from error
        self._received_s = time.monotonic()
        return body

    def look(self) -> FromStage | None:
        """Receive all heartbeats that have arrived, without waiting, while no answer is due.

        Returns the first message that is none, else None. Raises SilentError if the peer has been silent for longer
        than it may, and WireError.
        """
        now_s = time.monotonic()  # before the look, since this process may be stopped in between
        while self._readable():
            if (body := self._receive()) != _HEARTBEAT:
                return FROM_STAGE.decode(body)
        if self._silence_s and now_s - self._received_s > self._silence_s:
            raise self._silent()
        return None

    def _receive(self) -> bytes:
        """Return the next message's bytes, and record the time. Raises SilentError with the allowed silence, and WireError."""
        try:
            body = self._connection.receive()
        except SilentError as error:
            raise self._silent() from error
        self._received_s = time.monotonic()
        return body

    def _silent(self) -> SilentError:
        """Return the error of a peer that has been silent for too long, with the remedy."""
        return SilentError(
            f"it has given no sign of life for {self._silence_s:g} s (--stage-timeout): its process is stopped, its machine hangs, or "
            "the network drops its packets; see to it, then start the server again"
        )

    def ended(self) -> bool:
        """Return True if the peer has closed the connection and nothing unread remains; from any thread. Never waits.

        Unread bytes may be another thread's. An error counts as the end.
        """
        try:
            over = self._polled(_CLOSED) & (_CLOSED | select.POLLHUP | select.POLLERR)
            # Its last message is received first: that may be the reason.
            return bool(over) and not fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)).strip(b"\0")
        except (WireError, OSError, ValueError):  # closed meanwhile
            return True

    def _readable(self) -> bool:
        """Return True if something can be received without waiting."""
        return bool(self._polled(select.POLLIN))

    def _polled(self, events: int) -> int:
        """Return the bits of ``events`` that have happened, with those of hang-ups and errors; 0 if none. Does not
        wait.

        Raises EndedError if this end has closed the connection.
        """
        if self._socket.fileno() < 0:
            raise EndedError("this end has closed the connection")
        poll = select.poll()
        poll.register(self._socket, events)
        polled = poll.poll(0)
        return polled[0][1] if polled else 0

    def close(self) -> None:
        """End the connection, for a thread that receives at this moment too."""
        shut(self._socket)
        self._connection.raw.close()


# Requests to a process that has a part of a model, and the error if it does not answer.


_Reply = TypeVar("_Reply", bound=FromStage)


class StepFailedError(RuntimeError):
    """A step failed in a process, which continues."""


class Talk:
    """Request channel to the process ``whom`` (its name for people). Methods raise PartLostError if it is lost,
    and StepFailedError if a step failed there.
    """

    def __init__(self, whom: object, link: StageLink) -> None:
        self._whom, self._link = whom, link

    def send(self, message: ToStage, body: memoryview | bytes = b"") -> None:
        """Send a message without waiting for an answer. Raises PartLostError if the process is gone."""
        try:
            self._link.send(message, body)
        except WireError as error:
            raise self._lost(str(error)) from error

    def receive(self, kind: type[_Reply]) -> _Reply:
        """Return the next message, which must be of ``kind``.

        Raises PartLostError if the process is gone, cannot continue or answers otherwise, and StepFailedError for a
        step's error.
        """
        try:
            message = self._link.receive(FROM_STAGE)
        except WireError as error:
            raise self._lost(str(error)) from error
        if isinstance(message, StageUnable):
            raise self._lost(message.reason)
        if isinstance(message, Failed):
            raise StepFailedError(f"{self._whom}: {message.reason}")
        if not isinstance(message, kind):
            raise self._lost(f"it answers with {type(message).__name__}")
        return message

    def request(self, message: ToStage, kind: type[_Reply], body: memoryview | bytes = b"") -> _Reply:
        """Send a message and return its answer."""
        self.send(message, body)
        return self.receive(kind)

    def body(self, nbytes: int) -> bytearray:
        """Return the raw bytes that the last answer announced. Raises PartLostError if the process is gone."""
        try:
            return self._link.receive_body(nbytes)
        except WireError as error:
            raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> PartLostError:
        """Return the error of a lost process."""
        return PartLostError(loss_message(self._whom, reason))


def loss_message(whom: object, reason: str) -> str:
    """Return the error's text for the loss of a part of the model."""
    return f"{whom} of the model is gone, so nothing can be computed: {reason}"


def loss_of_idle(whom: object, link: StageLink) -> str:
    """Return why a process with no request at present is gone, or may not be used; empty if it is there. Does not wait."""
    try:
        message = link.look()
    except WireError as error:
        return loss_message(whom, str(error))
    if message is None:
        return ""
    return loss_message(
        whom, message.reason if isinstance(message, StageUnable) else "it sends an answer without a request"
    )

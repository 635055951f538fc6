"""The client side of the connection to the coordinator, for agents and operators.

A program must prove that it knows the run's token before a client sends it secrets or obeys it; otherwise the
client tries the next address. An agent works without a coordinator. While it is not connected it dials with
randomized exponential back-off, so 12,500 agents do not arrive at once after a restart. It begins each
connection by describing itself, so reports made while disconnected are not kept.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from phalanx.fleet.control.credentials import (
    END,
    Credentials,
    Greeting,
    HandshakeStream,
    Method,
    RefusalCode,
    TurnedAwayError,
    connect,
)
from phalanx.fleet.control.transport import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, QUEUED, TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.succession import NOT_LED
from phalanx.wire import messages as wire

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_CLOSE_S = 0.2
_WRONG_TOKEN = (
    "the operators' token of this run is in fleet.operator-token of its directory: read it there, as its owner, or give it in "
    "PHALANX_OPERATOR_TOKEN. It may have been changed (phalanx fleet rotate-tokens)"
)


class CoordinatorLink:
    """An agent's connection, attached whenever the coordinator is reachable."""

    def __init__(
        self,
        where: Callable[[], Sequence[str]],
        credentials: Credentials,
        first_reports: Callable[[], list[m.AgentReport]],
        on_command: Callable[[c.Command], None],
        log: Callable[[str], None],
        on_other_start: Callable[[], None] = lambda: None,
        on_wrong_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up the link. Nothing is dialed until ``run``.

        Args:
            where: Returns the addresses ("host:port") at which the coordinator may be. Called before each
                dial; after a failure the next one is tried.
            credentials: Those of the run.
            first_reports: Returns the reports to send first on each connection: a Joined, and reports that
                the coordinator may have missed.
            on_command: Called with each command, in the event loop.
            log: Called with lines for people.
            on_other_start: Called when the peer claims to coordinate another run, or another start of this
                run. The claim is unproven: check the run directory, and do no more.
            on_wrong_token: Called likewise when the peer rejects the token.
        """
        self._where, self._credentials, self._log = where, credentials, log
        self._first_reports, self._on_command = first_reports, on_command
        self._on_refused: dict[RefusalCode, Callable[[], None]] = {
            "another start": on_other_start,
            "unauthenticated": on_wrong_token,
        }
        self._queue: asyncio.Queue[m.AgentMessage] | None = None
        self._stream: wire.FrameStream | None = None
        self._dropping: asyncio.Future[str] | None = None
        self._led_s: float | None = None
        self._follows = NOT_LED
        self.address = ""
        """The address of the present stream, or of the last one."""

    def change_token(self, credentials: Credentials) -> None:
        """Use other credentials from now on. An attached link ends its stream, and ``run`` attaches again."""
        self._credentials = credentials
        if self._stream is not None:
            # Ends this side of the stream; the coordinator then ends the other. No command is lost on the
            # way.
            self._stream.write(END)

    @property
    def attached(self) -> bool:
        """True if a stream is open, as far as this side knows."""
        return self._queue is not None

    @property
    def led_s(self) -> float | None:
        """Monotonic time of the last leader heartbeat on the present stream; None for a candidate, and
        without a stream.
        """
        return self._led_s if self.attached else None

    @property
    def led(self) -> bool:
        """True if a stream is open to the leading coordinator: not to a candidate, and not to a superseded
        one.
        """
        return self.led_s is not None

    def drop(self, reason: str) -> None:
        """Close the present stream, and try the next address."""
        if self._dropping is not None and not self._dropping.done():
            self._dropping.set_result(reason)

    def send(self, report: m.AgentMessage) -> None:
        """Queue a report for sending. Drop it while not attached or if the queue is full: ``first_reports`` repeats
        the essential state.
        """
        if self._queue is not None:
            with suppress(asyncio.QueueFull):
                self._queue.put_nowait(report)

    async def run(self) -> None:
        """Attach, and attach again after each end, until cancelled.

        Addresses are tried in turn, with random pauses that double until a connection was proven. A failure is
        logged unless it repeats the last one of its address.
        """
        pause_s, complaints, tried = _FIRST_PAUSE_S, dict[str, str](), set[str]()
        while True:
            addresses = self._where()
            if tried.issuperset(addresses):
                tried.clear()
            address = next((candidate for candidate in addresses if candidate not in tried), "")
            if address:
                failure, was_attached = await self._attach_once(address)
            else:
                failure, was_attached = "its address is not known yet", False
            if was_attached:
                pause_s = _FIRST_PAUSE_S
                tried.clear()
            else:
                tried.add(address)
            if failure and failure != complaints.get(address):
                at = f" at {address}" if address else ""
                self._log(f"not attached to the coordinator{at}: {failure}; trying again")
            complaints[address] = failure
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attach_once(self, address: str) -> tuple[str, bool]:
        """Run one stream to its end: send ``first_reports`` and then the queue, and pass on each command.

        Return why it ended, and True if the coordinator had proven itself and this agent did not drop it.
        Connection errors are returned, not raised. A refusal calls its handler once the stream is closed.
        """
        proven, self.address = False, address
        queue: asyncio.Queue[m.AgentMessage] = asyncio.Queue(QUEUED)
        writing = None
        dropping = self._dropping = asyncio.get_running_loop().create_future()
        on_refused: Callable[[], None] | None = None
        try:
            async with _opened(address, self._credentials) as frames:
                try:
                    self._stream = frames
                    seals = await _handshake(frames, self._credentials, "Attach", address)
                    proven = True
                    for report in self._first_reports():
                        queue.put_nowait(report)
                    self._queue = queue
                    writing = asyncio.create_task(_send_all(frames, queue, seals, self.drop))
                    while True:
                        sealed = await _receive_unless(frames, dropping)
                        self._on_encoded_command(seals.incoming.open(sealed))
                finally:
                    # Before the stream is closed, which takes a moment: a report to it would be lost.
                    self._led_s = self._queue = self._stream = None
        except _Dropped:
            return dropping.result(), False
        except wire.EndedError as error:
            return "it closed the connection" if proven else str(error), proven
        except TurnedAwayError as error:
            on_refused = self._on_refused.get(error.code)
            return str(error), proven
        except wire.WireError as error:
            return str(error), proven
        finally:
            self._dropping = None
            if writing is not None:
                writing.cancel()
            if on_refused is not None:
                on_refused()

    def _on_encoded_command(self, body: bytes) -> None:
        """Decode a command and pass it on to ``on_command``. One that cannot be decoded is logged and dropped.

        A ``Lead`` (leader heartbeat) is not passed on: it renews the leadership, or drops a stream of an earlier
        reign. Commands on a dropped stream are ignored.
        """
        try:
            command = c.decode_command(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._log(f"a command that cannot be decoded: {error}")
        else:
            if isinstance(command, c.Lead):
                # Followed, unless a later coordinator has led this agent.
                if command.reign < self._follows:
                    self.drop(
                        f"it leads in reign {command.reign}, and was superseded: reign {self._follows} has begun"
                    )
                else:
                    self._led_s, self._follows = time.monotonic(), command.reign
            elif self._dropping is None or not self._dropping.done():
                self._on_command(command)


class _Dropped(Exception):  # noqa: N818
    """The agent has closed the stream itself."""


async def _receive_unless(frames: wire.FrameStream, dropping: asyncio.Future[str]) -> bytes:
    """Return the next frame of a stream. Raise ``_Dropped`` if ``dropping`` is done first, even if a frame has come
    too.
    """
    reading = asyncio.ensure_future(frames.receive(MAX_COMMAND_BYTES + wire.SEAL_BYTES))
    try:
        await asyncio.wait((reading, dropping), return_when=asyncio.FIRST_COMPLETED)
        if dropping.done():
            raise _Dropped
        return await reading
    finally:
        reading.cancel()


@asynccontextmanager
async def _opened(address: str, credentials: Credentials) -> AsyncIterator[wire.FrameStream]:
    """Connect to an address and yield the stream, closed afterwards. Raises ``EndedError`` if it cannot be
    reached.
    """
    frames = await connect(address, credentials.certificates)
    try:
        yield frames
    finally:
        await frames.closed(_CLOSE_S)


async def _handshake(
    frames: wire.FrameStream, credentials: Credentials, method: Method, address: str
) -> wire.Seals:
    """Run the client's side of the handshake, and return the seals of the stream.

    Raises ``TurnedAwayError`` if the server refuses, and ``UnprovenError`` for any other failure.
    """
    stream = HandshakeStream(frames)
    try:
        await stream.send(Greeting(method, credentials.facts()))
        return await credentials.prove(stream, method, "client")
    except TurnedAwayError:
        raise
    except wire.EndedError as error:
        raise wire.UnprovenError(
            f"the program at {address} ended the stream before it had proven itself"
        ) from error
    except wire.WireError as error:
        raise wire.UnprovenError(f"the program at {address} {error}") from error


async def _send_all(
    frames: wire.FrameStream,
    queue: asyncio.Queue[m.AgentMessage],
    seals: wire.Seals,
    drop: Callable[[str], None],
) -> None:
    """Send queued reports, sealed, until the stream ends. For a report that is too long, call ``drop`` and return."""
    try:
        while True:
            sealed = seals.outgoing.close(m.encode(await queue.get()))
            await frames.send(sealed, MAX_REPORT_BYTES + wire.SEAL_BYTES)
    except wire.MessageError as error:
        drop(f"a report to it is {error}")
    except wire.WireError:
        return  # the reader sees the same end, and reports why


async def operate(
    address: str, credentials: Credentials, operation: m.OperatorRequest, timeout_s: float = 10.0
) -> str:
    """Send an operator's request to a coordinator on a stream of its own; return its answer. Needs the operator's
    token.

    Raises ``TransportError`` with a remedy if it cannot be reached, refuses, or takes longer than ``timeout_s``.
    """
    remedy = "check with phalanx status RUN whether the run is active"
    try:
        async with asyncio.timeout(timeout_s), _opened(address, credentials) as frames:
            seals = await _handshake(frames, credentials, "Operate", address)
            await frames.send(seals.outgoing.close(m.encode(operation)))
            return seals.incoming.open(await frames.receive()).decode()
    except TimeoutError:
        reason = f"no answer within {timeout_s:g} s"
    except TurnedAwayError as error:
        reason = str(error)
        remedy = _WRONG_TOKEN if error.code == "unauthenticated" else remedy
    except wire.WireError as error:
        reason = str(error)
    raise TransportError(f"the coordinator at {address} did not accept the request ({reason}); {remedy}")


async def answers(address: str, credentials: Credentials, timeout_s: float = 5.0) -> bool:
    """Return True if a program at ``address`` proves within the time that it is this run's coordinator."""
    try:
        async with asyncio.timeout(timeout_s), _opened(address, credentials) as frames:
            await _handshake(frames, credentials, "Operate", address)
    except (wire.WireError, TimeoutError):
        return False
    return True

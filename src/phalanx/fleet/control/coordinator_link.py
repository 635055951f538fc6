"""The client side of the connection to the coordinator, for agents and operators.

Nothing is said to, and nothing is taken from, a program that has not proven that it knows the run's token; the next address is
tried instead. An agent works on without a coordinator. Whenever it is not connected it dials, with randomized exponential back-off (so that
12,500 agents do not come at once after a restart), and begins by describing itself; reports that were made while it
was not connected are therefore not kept.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec

from phalanx.fleet.control.credentials import OTHER_START, Credentials
from phalanx.fleet.control.transport import CLIENT_OPTIONS, QUEUED, SERVICE, TransportError
from phalanx.fleet.core.commands import (
    Command,
    Lead,
    decode_command,
)
from phalanx.fleet.core.messages import (
    AgentMessage,
    AgentReport,
    OperatorRequest,
    encode,
)
from phalanx.fleet.core.succession import NOT_LED
from phalanx.wire.messages import ForgedError, UnprovenError
from phalanx.wire.token_proof import Seals

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_STATUS_S = 1.0
_WRONG_TOKEN = (
    "the operators' token of this run is in fleet.operator-token of its directory: read it there, as its owner, or give it in "
    "PHALANX_OPERATOR_TOKEN. It may have been changed (phalanx fleet rotate-tokens)"
)


class CoordinatorLink:
    """An agent's connection, attached whenever the coordinator is there."""

    def __init__(
        self,
        where: Callable[[], Sequence[str]],
        credentials: Credentials,
        first_reports: Callable[[], list[AgentReport]],
        on_command: Callable[[Command], None],
        log: Callable[[str], None],
        on_other_start: Callable[[], None] = lambda: None,
        on_wrong_token: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            where: Returns the addresses ("host:port") at which the coordinator may be, before each dial; after one has failed the next
                one is tried.
            credentials: Those of the run.
            first_reports: Returns the reports to send first on each connection: a Joined, and what the coordinator may have missed.
            on_command: Called with each command, in the event loop.
            log: Called with lines for people.
            on_other_start: Called when whoever listens says that it coordinates another start of the run, or another run. Nothing
                proves that: it is a reason to look into the run directory, and no more.
            on_wrong_token: Called likewise when whoever listens does not accept the token.
        """
        self._where, self._credentials, self._first_reports, self._on_command, self._log = (
            where,
            credentials,
            first_reports,
            on_command,
            log,
        )
        self._on_refused = {OTHER_START: on_other_start, grpc.StatusCode.UNAUTHENTICATED: on_wrong_token}
        self._queue: asyncio.Queue[AgentMessage] | None = None
        self._call: _Call | None = None
        self._closing: asyncio.Future[None] | None = None
        self._dropping: asyncio.Future[str] | None = None
        self._led_s: float | None = None
        self._follows = NOT_LED
        self.address = ""
        """Where the present stream leads, or the last one did."""

    def change_token(self, credentials: Credentials) -> None:
        """Attaches anew, with other credentials from now on."""
        self._credentials = credentials
        if self._call is not None:
            # Ends this side of the stream, and then the coordinator the other: no command is lost on the way.
            self._closing = asyncio.ensure_future(_end_writing(self._call))

    @property
    def attached(self) -> bool:
        """True if a stream is open, as far as this side knows."""
        return self._queue is not None

    @property
    def led_s(self) -> float | None:
        """When the coordinator on the present stream last said that it leads, by the monotonic clock; None for a candidate, and without a stream."""
        return self._led_s if self.attached else None

    @property
    def led(self) -> bool:
        """True if a stream is open to a coordinator that leads: to no candidate, and to none that was superseded."""
        return self.led_s is not None

    def drop(self, why: str) -> None:
        """Gives the present stream up, and tries the next address."""
        if self._dropping is not None and not self._dropping.done():
            self._dropping.set_result(why)

    def say(self, report: AgentMessage) -> None:
        """Sends a report; dropped while not attached, since ``first_reports`` repeats what matters."""
        if self._queue is not None:
            with suppress(asyncio.QueueFull):
                self._queue.put_nowait(report)

    async def run(self) -> None:
        """Attaches, again and again, until cancelled."""
        pause_s, complaints, tried = _FIRST_PAUSE_S, dict[str, str](), set[str]()
        while True:
            addresses = self._where()
            if tried.issuperset(addresses):
                tried.clear()
            address = next((one for one in addresses if one not in tried), "")
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
        """Runs one stream to its end. Returns why it ended, and True if the coordinator has proven itself on it."""
        answered, self.address = False, address
        async with _channel(address, self._credentials) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Attach")(metadata=self._credentials.metadata())
            queue: asyncio.Queue[AgentMessage] = asyncio.Queue(QUEUED)
            writing = None
            self._call = call
            dropping = self._dropping = asyncio.get_running_loop().create_future()
            try:
                seals = await _proven(call, self._credentials, "Attach", address)
                answered = True
                for report in self._first_reports():
                    queue.put_nowait(report)
                self._queue = queue
                writing = asyncio.create_task(_send_all(call, queue, seals))
                while (body := await _read_unless(call, dropping)) is not grpc.aio.EOF:
                    self._on_encoded_command(seals.incoming.open(body))
                return _ending(await call.code(), await call.details()), answered
            except _Dropped:
                return dropping.result(), False
            except (UnprovenError, ForgedError) as error:
                return str(error), answered
            except grpc.RpcError as error:
                return _reason(error), answered
            finally:
                self._led_s = self._dropping = None
                code = await call.code() if not answered and call.done() else None
                self._queue = self._call = None
                if writing is not None:
                    writing.cancel()
                call.cancel()
                if code is not None and (on_refused := self._on_refused.get(code)):
                    on_refused()

    def _on_encoded_command(self, body: bytes) -> None:
        try:
            command = decode_command(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._log(f"a command that cannot be decoded: {error}")
        else:
            if isinstance(command, Lead):
                self._take_lead(command.reign)
            elif self._dropping is None or not self._dropping.done():
                self._on_command(command)

    def _take_lead(self, reign: int) -> None:
        """Follows a coordinator, unless a later one has led this agent."""
        if reign < self._follows:
            self.drop(f"it leads in reign {reign}, and was superseded: reign {self._follows} has begun")
        else:
            self._led_s, self._follows = time.monotonic(), reign


class _Dropped(Exception):  # noqa: N818
    """The agent has given a stream up."""


async def _read_unless(call: _Call, dropping: asyncio.Future[str]) -> Any:
    """The next message of a stream. Raises ``_Dropped`` if it is given up first."""
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait((reading, dropping), return_when=asyncio.FIRST_COMPLETED)
    if dropping.done():
        reading.cancel()
        raise _Dropped
    return await reading


class _Call(Protocol):
    """A call as gRPC, which has no types, hands it to the client."""

    async def write(self, message: bytes) -> None: ...
    async def read(self) -> Any: ...
    async def code(self) -> grpc.StatusCode: ...
    async def details(self) -> str: ...
    def done(self) -> bool: ...
    async def done_writing(self) -> None: ...


@dataclass(frozen=True)
class _ClientStream:
    """The client's side of a stream, during the handshake."""

    call: _Call

    async def write(self, message: bytes) -> None:
        await self.call.write(message)

    async def read(self) -> bytes:
        body = await self.call.read()
        return body if isinstance(body, bytes) else b""


async def _proven(call: _Call, credentials: Credentials, method: str, address: str) -> Seals:
    """The seals of a stream, once whoever listens there has proven that it is the run's coordinator; raises ``UnprovenError``."""
    try:
        return await credentials.prove(_ClientStream(call), method, "client")
    except (UnprovenError, asyncio.InvalidStateError) as error:
        ended = isinstance(error, asyncio.InvalidStateError)
        why = f"the program at {address} {'ended the stream before it had proven itself' if ended else error}"
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_S):
                # Whoever refused us says why in the status; a stream that is still open has none.
                if (code := await call.code()) is not grpc.StatusCode.OK:
                    why = f"{code.name.lower()}: {await call.details()}"
        raise UnprovenError(why) from error


async def _end_writing(call: _Call) -> None:
    with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader sees the same end
        await call.done_writing()


async def _send_all(call: _Call, queue: asyncio.Queue[AgentMessage], seals: Seals) -> None:
    with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader sees the same end, and reports why
        while True:
            await call.write(seals.outgoing.close(encode(await queue.get())))


def _ending(code: grpc.StatusCode, details: str) -> str:
    return "it closed the connection" if code is grpc.StatusCode.OK else f"{code.name.lower()}: {details}"


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return repr(error)


def _channel(address: str, credentials: Credentials) -> Any:
    shown = credentials.certificates
    if shown is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    tls = grpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate)
    return grpc.aio.secure_channel(address, tls, options=CLIENT_OPTIONS)


async def operate(
    address: str, credentials: Credentials, operation: OperatorRequest, timeout_s: float = 10.0
) -> str:
    """Sends an operator's request to a coordinator; returns its answer.

    Raises:
        TransportError: It is not there, or refuses.
    """
    async with _channel(address, credentials) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Operate")(
            metadata=credentials.metadata(), timeout=timeout_s
        )
        try:
            seals = await _proven(call, credentials, "Operate", address)
            await call.write(seals.outgoing.close(encode(operation)))
            await call.done_writing()
            answer = await call.read()
            if not isinstance(answer, bytes):
                raise UnprovenError(_ending(await call.code(), await call.details()))
            return seals.incoming.open(answer).decode()
        except (grpc.RpcError, UnprovenError, ForgedError) as error:
            reason = _reason(error) if isinstance(error, grpc.RpcError) else str(error)
            wrong = call.done() and await call.code() is grpc.StatusCode.UNAUTHENTICATED
            remedy = _WRONG_TOKEN if wrong else "is the run going on? see phalanx status RUN"
            raise TransportError(
                f"the coordinator at {address} did not do it ({reason}); {remedy}"
            ) from error


async def answers(address: str, credentials: Credentials, timeout_s: float = 5.0) -> bool:
    """True if a program at ``address`` proves within the time that it is this run's coordinator."""
    async with _channel(address, credentials) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Operate")(
            metadata=credentials.metadata(), timeout=timeout_s
        )
        try:
            await _proven(call, credentials, "Operate", address)
        except (grpc.RpcError, UnprovenError):
            return False
        finally:
            call.cancel()
        return True

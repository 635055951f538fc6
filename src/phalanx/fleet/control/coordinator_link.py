"""The client side of the connection to the coordinator, for agents and operators.

An agent works on without a coordinator. Whenever it is not connected it dials, with randomized exponential back-off (so that
12,500 agents do not come at once after a restart), and begins by describing itself; reports that were made while it
was not connected are therefore not kept.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec

from phalanx.fleet.control.transport import (
    CLIENT_OPTIONS,
    QUEUED,
    SERVICE,
    Credentials,
    TransportError,
)
from phalanx.fleet.core.messages import (
    AgentMessage,
    AgentReport,
    Command,
    OperatorRequest,
    decode_command,
    encode,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class CoordinatorLink:
    """An agent's connection, attached whenever the coordinator is there."""

    def __init__(
        self,
        where: Callable[[], str],
        credentials: Credentials,
        first_reports: Callable[[], list[AgentReport]],
        on_command: Callable[[Command], None],
        log: Callable[[str], None],
    ) -> None:
        """
        Args:
            where: Returns the coordinator's address as "host:port", before each dial; empty while it is not known.
            credentials: Those of the run.
            first_reports: Returns the reports to send first on each connection: a Joined, and what the coordinator may have missed.
            on_command: Called with each command, in the event loop.
            log: Called with lines for people.
        """
        self._where, self._credentials, self._first_reports, self._on_command, self._log = (
            where,
            credentials,
            first_reports,
            on_command,
            log,
        )
        self._queue: asyncio.Queue[AgentMessage] | None = None

    @property
    def attached(self) -> bool:
        """True if a stream is open, as far as this side knows."""
        return self._queue is not None

    def say(self, report: AgentMessage) -> None:
        """Sends a report; dropped while not attached, since ``first_reports`` repeats what matters."""
        if self._queue is not None:
            with suppress(asyncio.QueueFull):
                self._queue.put_nowait(report)

    async def run(self) -> None:
        """Attaches, again and again, until cancelled."""
        pause_s, complaint = _FIRST_PAUSE_S, ""
        while True:
            failure, was_attached = await self._attach_once()
            if was_attached:
                pause_s = _FIRST_PAUSE_S
            if failure and failure != complaint:
                self._log(f"not attached to the coordinator: {failure}; trying again")
            complaint = failure
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attach_once(self) -> tuple[str, bool]:
        """Runs one stream to its end. Returns why it ended, and True if the coordinator ever answered on it."""
        address, answered = self._where(), False
        if not address:
            return "its address is not known yet", False
        async with _channel(address, self._credentials) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Attach")(metadata=self._credentials.metadata())
            queue: asyncio.Queue[AgentMessage] = asyncio.Queue(QUEUED)
            writing = None
            try:
                await call.wait_for_connection()
                for report in self._first_reports():
                    queue.put_nowait(report)
                self._queue = queue
                writing = asyncio.create_task(_send_all(call, queue))
                while (body := await call.read()) is not grpc.aio.EOF:
                    answered = True
                    self._on_encoded_command(body)
                return _ending(await call.code(), await call.details()), answered
            except grpc.RpcError as error:
                return _reason(error), answered
            finally:
                self._queue = None
                if writing is not None:
                    writing.cancel()
                call.cancel()

    def _on_encoded_command(self, body: bytes) -> None:
        try:
            command = decode_command(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._log(f"a command that cannot be decoded: {error}")
        else:
            self._on_command(command)


class _Call(Protocol):
    async def write(self, message: bytes) -> None: ...


async def _send_all(call: _Call, queue: asyncio.Queue[AgentMessage]) -> None:
    with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader sees the same end, and reports why
        while True:
            await call.write(encode(await queue.get()))


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
        call = channel.unary_unary(f"/{SERVICE}/Operate")
        try:
            answer: bytes = await call(encode(operation), metadata=credentials.metadata(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise TransportError(
                f"the coordinator at {address} did not do it ({_reason(error)}); is the run going on? "
                "see phalanx status RUN"
            ) from error
        return answer.decode()

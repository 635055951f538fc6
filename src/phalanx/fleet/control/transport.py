"""The transport between agents and the coordinator: one bidirectional gRPC stream per agent, and one call for operators.

This file has what both sides share, and the server side; the client side is ``phalanx.fleet.control.coordinator_link``.

gRPC (https://grpc.io) brings framing, flow control, TLS, keep-alive and bounds on sizes. Four rules come on top. The first messages of a
stream prove, in both directions, that the two sides know the run's token (``phalanx.wire.token_proof``) and belong to the same start of the
same run (``phalanx.run.peers.fencing``); before that an agent says nothing to whoever listens, and obeys nothing. Every message after that is
sealed with a key of that connection, which is derived from all of this: nobody in between can alter or add one, and no command of another
start opens. A message that cannot be decoded is refused, counted and logged, and changes nothing. And nothing waits for a slow reader: its
queue is short, and when it is full the connection is closed; the agent reconnects and describes itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import gethostname
from typing import Any, Protocol, TypeGuard

import grpc
import grpc.aio
import msgspec

from phalanx.fleet.control.credentials import Credentials, Refusal, host_in
from phalanx.fleet.control.descriptors import most_connections
from phalanx.fleet.core.commands import (
    Command,
    Fence,
    Lead,
    ReadToken,
)
from phalanx.fleet.core.messages import (
    AgentMessage,
    Folded,
    Joined,
    OperatorRequest,
    Received,
    Rollcall,
    Suspect,
    decode_report,
    encode,
)
from phalanx.hardware.local.network import join_address
from phalanx.run.peers.clocks import own_clock_is_wrong
from phalanx.wire.messages import ForgedError, UnprovenError
from phalanx.wire.token_proof import SEAL_BYTES, Seals, token_name

MAX_REPORT_BYTES = 4 << 20
"""Largest message to the coordinator; a Joined with 65,536 snapshots stays below it."""
MAX_COMMAND_BYTES = 256 << 20
"""Largest message to an agent: a Bind onto another number of ranks may list the holders of every rank."""
QUEUED = 256
_KEEPALIVE_MS, _KEEPALIVE_PATIENCE_MS = 20_000, 60_000
"""A half-open connection is noticed within these times; a busy machine must not be taken for one."""
_FLUSH_S = 0.2
SERVICE = "phalanx.Fleet"
_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REPORT_BYTES + SEAL_BYTES),
    ("grpc.max_send_message_length", MAX_COMMAND_BYTES + SEAL_BYTES),
    ("grpc.so_reuseport", 0),  # a second coordinator on the same port is a mistake
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Strangers who connect and say nothing, or nothing that matters, give their descriptors back.
    ("grpc.server_handshake_timeout_ms", 30_000),
    ("grpc.max_connection_idle_ms", 60_000),
]
CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_COMMAND_BYTES + SEAL_BYTES),
    ("grpc.max_send_message_length", MAX_REPORT_BYTES + SEAL_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # each dial is a new connection, not a share in a broken one
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_PATIENCE_MS),
    ("grpc.enable_http_proxy", 0),
]


_HOSTS_COMPARED, _LONGEST_NAME = 50_000, 255
"""Whoever dials names its host before it has proven anything: names do not fill the memory."""


class TransportError(RuntimeError):
    """The coordinator cannot be reached, or refuses; the text says why and what to do."""


# --- the coordinator's side -----------------------------------------------------------------------


class AgentLink:
    """The server side of one agent's stream."""

    def __init__(self, node: str, incarnation: int, token_name: str = "") -> None:
        self.node, self.incarnation, self.token_name = node, incarnation, token_name
        self.attaches_again = False
        """It was told to: that this stream ends says nothing of the agent."""
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self.closed = asyncio.Event()

    def send(self, command: bytes) -> None:
        """Queues an encoded command; an agent that does not read its commands is disconnected, and may dial again."""
        try:
            self.queue.put_nowait(command)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """Ends the stream."""
        self.closed.set()


class Listener(Protocol):
    """The coordinator's handlers of what arrives; called from the event loop, must not block."""

    def on_report(self, report: AgentMessage) -> None:
        """Takes a report of an attached agent, its Joined included."""

    def on_disconnect(self, link: AgentLink) -> None:
        """Called when the stream of an attached agent has ended."""

    async def on_operation(self, operation: OperatorRequest) -> str:
        """Takes an operator's request; returns the answer."""

    def log(self, line: str) -> None:
        """Writes a line for people."""


class _CallContext(Protocol):
    """A call as gRPC, which has no types, hands it to the server."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    def peer(self) -> str: ...
    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...
    async def write(self, message: bytes) -> None: ...


class FleetServer:
    """The coordinator's server: the agents that are attached, and counts of what was refused."""

    def __init__(self, credentials: Credentials, listener: Listener) -> None:
        self.listener = listener
        """To be replaced when a candidate becomes the coordinator."""
        self._untold: set[str] = set()
        """Nodes that have attached since the coordinator last said that it leads."""
        self.credentials = credentials
        """To be replaced when the tokens are changed."""
        self.links: dict[str, AgentLink] = {}
        """Node -> its current stream, for every attached node."""
        self.refused: Counter[str] = Counter()
        self._clocks: dict[str, float] = {}
        """Host -> seconds by which its clock is ahead of this machine's when it dialed last; 0 where it agrees."""
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (a free one for 0). Raises ``TransportError`` if the port is taken."""
        room = ("grpc.max_allowed_incoming_connections", most_connections())
        self._server = grpc.aio.server(options=[*_SERVER_OPTIONS, room])
        methods = {
            "Attach": grpc.stream_stream_rpc_method_handler(self._attach),
            "Operate": grpc.stream_stream_rpc_method_handler(self._operate),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            bound = self._bind(join_address(host, port))
        except RuntimeError as error:
            raise TransportError(
                f"cannot listen on {join_address(host, port)}; set fleet.port to a free one: {error}"
            ) from error
        await self._server.start()
        return bound

    def _bind(self, address: str) -> int:
        shown = self.credentials.certificates
        if shown is None:
            return int(self._server.add_insecure_port(address))
        tls = grpc.ssl_server_credentials(
            [(shown.key, shown.certificate)], shown.authority, require_client_auth=True
        )
        return int(self._server.add_secure_port(address, tls))

    async def stop(self, grace_s: float = 0.5) -> None:
        """Ends all streams, after what is queued has been sent or the grace has passed."""
        for link in list(self.links.values()):
            link.close()
        await self._server.stop(grace_s)

    def lead(self, reign: int, *, again: bool = False) -> None:
        """Tells the agents that have attached since the last call that this coordinator leads; with ``again``, all of them."""
        told, untold = encode(Lead(reign)), self._untold
        self._untold = set()
        for node in self.links.keys() if again else untold & self.links.keys():
            self.links[node].send(told)

    def send(self, node: str, command: Command) -> None:
        """Sends a command on a node's current stream; dropped if there is none, since an agent that attaches describes itself."""
        if node in self.links:
            link = self.links[node]
            link.attaches_again |= isinstance(command, ReadToken) and command.key != link.token_name
            link.send(encode(command))

    def drop_outdated(self, told: str) -> None:
        """Ends the streams that were opened with a token that is refused by now.

        Until agents have been told of the present token, whose name is ``told`` from then on, none is ended: all would be, at once.
        """
        if told != token_name(self.credentials.token):
            return
        names = self.credentials.accepted_names()
        for link in [link for link in self.links.values() if link.token_name not in names]:
            if self.links.get(link.node) is link:
                self.listener.log(
                    f"{link.node} has not taken over the run's new token: its connection is ended"
                )
                link.attaches_again = False
                link.close()

    def _refuse(self, kind: str, who: str, detail: str = "") -> None:
        self.refused[kind] += 1
        count = self.refused[kind]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood does not fill the log
            self.listener.log(f"refused {kind} from {who} ({count} so far) {detail}".rstrip())

    async def _admit(self, method: str, requests: AsyncIterator[bytes], context: _CallContext) -> Seals:
        """The seals of a stream whose client has proven itself; else the stream is aborted."""
        shown = context.invocation_metadata() or ()
        refusal = self.credentials.refusal(shown, method)
        if method == "Attach":
            refusal = self._compare_clocks(host_in(shown), refusal)
        if refusal is None:
            try:
                return await self.credentials.prove(_ServerStream(requests, context), method, "server")
            except UnprovenError as error:
                why = f"wrong token: the other side {error}"
                refusal = Refusal("wrong token", grpc.StatusCode.UNAUTHENTICATED, why)
        self._refuse(refusal.kind, context.peer(), refusal.why)
        await context.abort(refusal.code, refusal.why)
        raise AssertionError("abort raises")

    def _compare_clocks(self, host: str, refusal: Refusal | None) -> Refusal | None:
        """The refusal, saying so if it is this machine's clock that is wrong."""
        own = gethostname()
        full = len(self._clocks) >= _HOSTS_COMPARED and host not in self._clocks
        unfit = not 0 < len(host) <= _LONGEST_NAME or not host.isprintable()
        if host == own or full or unfit or (refusal is not None and not refusal.ahead_s):
            return refusal
        self._clocks[host] = refusal.ahead_s if refusal is not None else 0.0
        if refusal is None:
            return None
        apart = {name: ahead_s for name, ahead_s in self._clocks.items() if ahead_s}
        wrong = own_clock_is_wrong(apart, len(self._clocks) - len(apart), f"{own} (the coordinator)")
        return refusal._replace(why=wrong) if wrong else refusal

    async def _attach(self, requests: AsyncIterator[bytes], context: _CallContext) -> None:
        seals = await self._admit("Attach", requests, context)
        reports = self._decoded(self._opened(requests, seals, context.peer()), context.peer())
        link, tasks = None, list[asyncio.Task[object]]()
        try:
            async for first in reports:
                link = self._attached_link(first, context.peer(), seals.token_name)
                break
            if link is None:
                return
            writing = asyncio.create_task(_write(link, context, seals))
            reading = asyncio.create_task(self._read(link, reports, context.peer()))
            tasks = [writing, reading, asyncio.create_task(link.closed.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await _flushed(link, writing)
        finally:
            for task in tasks:
                task.cancel()
            if link is not None and self.links.get(link.node) is link:
                del self.links[link.node]
                if not link.attaches_again:
                    self.listener.on_disconnect(link)

    async def _opened(self, requests: AsyncIterator[bytes], seals: Seals, who: str) -> AsyncIterator[bytes]:
        """Yields the messages of a stream without their seals; ends at one that is forged."""
        async for sealed in requests:
            try:
                yield seals.incoming.open(sealed)
            except ForgedError as error:
                self._refuse("forged message", who, str(error))
                return

    async def _decoded(self, requests: AsyncIterator[bytes], who: str) -> AsyncIterator[Received]:
        """Yields the reports of a stream; what cannot be decoded is refused. Ends with the stream, however that ends."""
        with suppress(grpc.RpcError, asyncio.CancelledError, grpc.aio.UsageError, EOFError):
            async for body in requests:
                try:
                    yield decode_report(body)
                except (msgspec.MsgspecError, RecursionError) as error:
                    self._refuse("malformed message", who, str(error)[:200])

    def _attached_link(self, first: Received, who: str, token_name: str) -> AgentLink | None:
        """Attaches the stream that begins with ``first``; None if that is no Joined."""
        if not isinstance(first, Joined):
            self._refuse("stream that does not begin with Joined", who)
            return None
        link = AgentLink(first.node, first.incarnation, token_name)
        before = self.links.get(first.node)
        if before is not None and before.incarnation > first.incarnation:
            self._refuse("superseded incarnation", f"{first.node} at {who}")
            link.send(encode(Fence("a newer agent of this node is attached", first.incarnation)))
            link.close()
            return link
        self.links[first.node] = link
        self._untold.add(first.node)
        if before is not None:
            before.close()
        self.listener.on_report(first)
        return link

    async def _read(self, link: AgentLink, reports: AsyncIterator[Received], who: str) -> None:
        async for report in reports:
            if self.links.get(link.node) is not link:
                return
            if isinstance(report, Joined) and report.node == link.node:
                link.incarnation = report.incarnation
            if _speaks_for_itself(report, link.node):
                self.listener.on_report(report)
            else:
                self._refuse("message that speaks for others", f"{link.node} at {who}", type(report).__name__)

    async def _operate(self, requests: AsyncIterator[bytes], context: _CallContext) -> None:
        seals = await self._admit("Operate", requests, context)
        body = await anext(self._opened(requests, seals, context.peer()), b"")
        try:
            operation = decode_report(body)
            if not isinstance(operation, OperatorRequest):
                raise msgspec.ValidationError(f"{type(operation).__name__} is no operation")
        except msgspec.MsgspecError as error:
            self._refuse("malformed message", context.peer(), str(error)[:200])
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:500])
            raise AssertionError("abort raises") from error
        answer = await self.listener.on_operation(operation)
        await context.write(seals.outgoing.close(answer.encode()))


def _speaks_for_itself(report: Received, node: str) -> TypeGuard[AgentMessage]:
    """True if a report is about its sender, or is one of the audits and statistics that may accuse another node."""
    if isinstance(report, Suspect):
        return True
    return (
        not isinstance(report, OperatorRequest | Folded | Rollcall) and getattr(report, "node", node) == node
    )


@dataclass(frozen=True)
class _ServerStream:
    """The server's side of a stream, during the handshake."""

    requests: AsyncIterator[bytes]
    context: _CallContext

    async def write(self, message: bytes) -> None:
        await self.context.write(message)

    async def read(self) -> bytes:
        return await anext(self.requests, b"")


async def _write(link: AgentLink, context: _CallContext, seals: Seals) -> None:
    while True:
        await context.write(seals.outgoing.close(await link.queue.get()))


async def _flushed(link: AgentLink, writing: asyncio.Task[None]) -> None:
    """Gives the last commands (a Fence, a Shutdown) a moment to be sent."""
    if link.queue.empty():
        await asyncio.sleep(0)
    with suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_S):
            while not link.queue.empty() and not writing.done():
                await asyncio.sleep(0.01)

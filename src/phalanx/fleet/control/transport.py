"""The coordinator's server: one stream for each agent (``phalanx.fleet.control.credentials``), and one for
each request of an operator.

The client side is ``phalanx.fleet.control.coordinator_link``. The first messages of a stream are a handshake.
It proves in both directions that the two ends know the run's token (``phalanx.wire.messages``) and belong to
the same start of the same run (``phalanx.run.identity``). Before that an agent sends and obeys nothing.

Every later message is sealed with a key of that connection, derived from the handshake. So nobody in between
can alter or add a message, and a command of another start cannot be opened. A message that cannot be decoded
is refused, counted and logged, and changes nothing. Nothing waits for a slow reader: its queue is short, and
when it is full the connection is closed; the agent reconnects and describes itself. If there are too many
connections, the oldest unproven one is closed.

Each connection is an open file, so the limit on open files is raised first, and bounds the number of
connections.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol, TypeGuard

import msgspec

from phalanx.fleet.control.credentials import (
    END,
    Credentials,
    Greeting,
    HandshakeStream,
    Refusal,
    TurnedAway,
    accepted,
    host_in,
)
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.hardware.local.network import family_of, join_address, resolved
from phalanx.process.this_process import RESERVE, host_name, raise_open_file_limit
from phalanx.run.peers import own_clock_is_wrong
from phalanx.wire import messages as wire
from phalanx.wire.port import shut

# The limit on open files is checked before the fleet depends on it. Every agent is a connection, and one that
# reconnects may count twice for a moment.


class DescriptorLimitError(RuntimeError):
    """The system allows too few open files for the fleet; the message has the number needed."""


def raise_descriptor_limit(nodes: int) -> int:
    """Raise this process's soft limit on open files for a coordinator of ``nodes`` nodes, and return the new limit.

    Raises ``DescriptorLimitError`` if the hard limit is lower than two files a node and a reserve.
    """
    needed = 2 * nodes + RESERVE
    limit = raise_open_file_limit(needed)
    if limit < needed:
        raise DescriptorLimitError(
            f"the coordinator of {nodes:,} nodes needs {needed:,} open files (two for each node and {RESERVE}), and this system allows "
            f"{limit:,}: raise the hard limit (ulimit -Hn; LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
    return limit


def most_connections() -> int:
    """Return the number of connections that leaves enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(RESERVE, soft - RESERVE)


MAX_REPORT_BYTES = 4 << 20
"""Largest message to the coordinator; a Joined with 65,536 snapshots stays below it."""
MAX_COMMAND_BYTES = 256 << 20
"""Largest message to an agent: a Bind onto another number of ranks may list the holders of every rank."""
QUEUED = 256
_FLUSH_S, _CLOSE_S, _LINGER_S = 0.2, 5.0, 1.0
_GREETING_S = 30.0
"""Clients that connect and send nothing are disconnected after this time."""
_BACKLOG, _ACCEPT_PAUSE_S = 4096, 0.2
_LONGEST_REASON = 8192
_HOSTS_COMPARED, _LONGEST_NAME = 50_000, 255
"""Limits on host names in memory: clients send one before they have proven anything."""


class TransportError(RuntimeError):
    """The coordinator cannot be reached, or refuses; the text has the reason and the remedy."""


# --- the coordinator's side -----------------------------------------------------------------------


class AgentLink:
    """The server side of one agent's stream."""

    def __init__(self, node: str, incarnation: int, token_name: str = "") -> None:
        """Set up the link of a node's agent, with the name of the token that it used; nothing is queued."""
        self.node, self.incarnation, self.token_name = node, incarnation, token_name
        self.attaches_again = False
        """It was ordered to attach again, so the end of this stream is no sign of a fault."""
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self.closed = asyncio.Event()

    def send(self, command: bytes) -> None:
        """Queue an encoded command. If the queue is full, close the link: an agent that does not read may dial
        again.
        """
        try:
            self.queue.put_nowait(command)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """End the stream."""
        self.closed.set()


class Listener(Protocol):
    """The coordinator's handlers of incoming messages. Called from the event loop; must not block."""

    def on_report(self, report: m.AgentMessage) -> None:
        """Take a report of an attached agent, its Joined included."""

    def on_disconnect(self, link: AgentLink) -> None:
        """Handle the end of an attached agent's stream."""

    async def on_operation(self, operation: m.OperatorRequest) -> str:
        """Take an operator's request, and return the answer."""

    def log(self, line: str) -> None:
        """Write a line for people."""


class FleetServer:
    """The coordinator's server: the attached agents, and counts of refused messages."""

    def __init__(self, credentials: Credentials, listener: Listener) -> None:
        """Set up the server, without a port; ``listener`` handles its messages."""
        self.listener = listener
        """Replaced when a candidate becomes the coordinator."""
        self._unnotified: set[str] = set()
        """Nodes that have attached since the last leader heartbeat."""
        self.credentials = credentials
        """Replaced when the tokens are changed."""
        self.links: dict[str, AgentLink] = {}
        """Node -> its current stream, for every attached node."""
        self.refused: Counter[str] = Counter()
        self._clocks: dict[str, float] = {}
        """Host -> seconds by which its clock was ahead of this machine's at its last dial; 0 if they agree."""
        self._listening: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._newcomers: dict[socket.socket, None] = {}
        """Connections that have not proven themselves, the oldest first."""

    async def start(self, host: str, port: int) -> int:
        """Listen, over TLS if there are certificates, and return the port (a free one for 0).

        Connections are accepted in a task until ``stop``. Raises ``TransportError`` if the port is taken, or
        the host is no address of this machine, and ``SecurityError`` for unusable certificates.
        """
        certificates = self.credentials.certificates
        tls = None if certificates is None else certificates.server_context()
        dual = host == "::" and socket.has_dualstack_ipv6()
        try:
            listener = socket.create_server(
                (host, port), family=family_of(host), backlog=_BACKLOG, dualstack_ipv6=dual
            )
        except OSError as error:
            is_elsewhere = error.errno == errno.EADDRNOTAVAIL or not resolved(host)
            remedy = (
                "give --host an address of this machine" if is_elsewhere else "set fleet.port to a free one"
            )
            raise TransportError(f"cannot listen on {join_address(host, port)}; {remedy}: {error}") from error
        listener.setblocking(False)
        self._listening = asyncio.create_task(self._listen(listener, tls, most_connections()))
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stop listening and end all streams. Queued messages have ``grace_s`` to be sent; then the streams are
        cancelled.
        """
        listening = [] if self._listening is None else [self._listening]
        for task in listening:
            task.cancel()
        for link in list(self.links.values()):
            link.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace_s)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*listening, *self._connections, return_exceptions=True)

    def lead(self, reign: int, *, again: bool = False) -> None:
        """Send a leader heartbeat to the agents that have attached since the last call; with ``again``, to
        all of them.
        """
        message, unnotified = m.encode(c.Lead(reign)), self._unnotified
        self._unnotified = set()
        for node in self.links.keys() if again else unnotified & self.links.keys():
            self.links[node].send(message)

    def send(self, node: str, command: c.Command) -> None:
        """Queue a command on a node's current stream; drop it if there is none, since an agent that attaches
        describes itself.

        After an order to read another token, the end of the stream is expected and reported as no disconnect.
        """
        if node in self.links:
            link = self.links[node]
            link.attaches_again |= isinstance(command, c.ReadToken) and command.key != link.token_name
            link.send(m.encode(command))

    def drop_outdated(self, reported_key: str) -> None:
        """Log and end the streams that were opened with a token that is refused by now.

        Does nothing until ``reported_key``, the name of the token that agents were ordered to use, is that of the
        present token: otherwise all would end at once.
        """
        if reported_key != wire.token_name(self.credentials.token):
            return
        names = self.credentials.accepted_names()
        for link in [link for link in self.links.values() if link.token_name not in names]:
            if self.links.get(link.node) is link:
                self.listener.log(
                    f"{link.node} has not taken over the run's new token: its connection is ended"
                )
                link.attaches_again = False
                link.close()

    def _refuse(self, kind: str, peer: str, detail: str = "") -> None:
        """Count a refusal by kind, and log it at each power of two."""
        self.refused[kind] += 1
        count = self.refused[kind]
        if count & (count - 1) == 0:  # The 1st, 2nd, 4th, 8th ...: a flood does not fill the log.
            self.listener.log(f"refused {kind} from {peer} ({count} so far) {detail}".rstrip())

    async def _listen(self, listener: socket.socket, tls: ssl.SSLContext | None, most: int) -> None:
        """Accept connections until cancelled, each served in a task.

        Above ``most`` connections, each new one closes the oldest that has not proven itself. A failure to
        accept is counted as refused, and retried after 0.2 s.
        """
        with listener:
            while True:
                try:
                    connection, address = await asyncio.get_running_loop().sock_accept(listener)
                except (
                    OSError
                ) as error:  # For example, no descriptor is left: others may be closed in a moment.
                    self._refuse("connection", "a client", str(error))
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                self._newcomers[connection] = None
                task = asyncio.create_task(self._accept(connection, join_address(*address[:2]), tls))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
                if len(self._connections) > most:
                    oldest = next(iter(self._newcomers))
                    del self._newcomers[oldest]
                    shut(oldest)
                await asyncio.sleep(0)  # A flood of connections does not delay those that are served.

    async def _accept(self, connection: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        """Serve one accepted connection, TLS handshake included, and close it. Errors of the connection are
        dropped.

        What is queued has 5 s to be sent. A cancellation, which ``stop`` sends, closes the connection at once.
        """
        frames, close_s = None, _CLOSE_S
        try:
            with suppress(wire.WireError, OSError):
                frames = await accepted(connection, tls)
                await self._serve(frames, connection, peer)
        except asyncio.CancelledError:  # By ``stop``, whose grace has passed.
            close_s = 0.0
        finally:
            self._newcomers.pop(connection, None)
            if frames is not None:
                with suppress(asyncio.CancelledError):
                    await frames.closed(close_s)
            connection.close()

    async def _serve(self, frames: wire.FrameStream, connection: socket.socket, peer: str) -> None:
        """Receive a stream's greeting, admit the client, and serve it as an agent's ("Attach") or else an
        operator's.

        A malformed greeting is counted as refused. Raises ``TimeoutError`` if none arrives in time, and
        ``WireError``.
        """
        stream = HandshakeStream(frames)
        try:
            async with asyncio.timeout(min(_GREETING_S, self.credentials.handshake_timeout_s)):
                greeting = await stream.receive()
        except wire.MessageError as error:
            self._refuse("malformed message", peer, str(error)[:200])
            return
        if not isinstance(greeting, Greeting):
            self._refuse("malformed message", peer, "no greeting")
            return
        seals = await self._admit(stream, greeting, peer)
        if seals is None:
            return
        self._newcomers.pop(connection, None)
        if greeting.method == "Attach":
            await self._attach(frames, seals, peer)
        else:
            await self._operate(frames, seals, peer)

    async def _admit(self, stream: HandshakeStream, greeting: Greeting, peer: str) -> wire.Seals | None:
        """Run the server's side of the handshake. Return the seals of a proven client, or None after a refusal.

        A refusal is counted, its reason is sent, and at most a second passes until the client has read that.
        Raises ``WireError`` if the reason cannot be sent.
        """
        refusal = self.credentials.refusal(greeting.facts, greeting.method)
        if greeting.method == "Attach":
            refusal = self._compare_clocks(host_in(greeting.facts), refusal)
        if refusal is None:
            try:
                return await self.credentials.prove(stream, greeting.method, "server")
            except wire.WireError as error:
                reason = f"wrong token: the other side {error}"
                refusal = Refusal("wrong token", "unauthenticated", reason)
        self._refuse(refusal.kind, peer, refusal.reason)
        await stream.send(TurnedAway(refusal.code, refusal.reason[:_LONGEST_REASON]))
        # Unread bytes would reset the connection, and the client might lose the reason.
        with suppress(TimeoutError, wire.WireError):
            async with asyncio.timeout(_LINGER_S):
                while True:
                    await stream.receive()
        return None

    def _compare_clocks(self, host: str, refusal: Refusal | None) -> Refusal | None:
        """Record by how much the host's clock differs, and return ``refusal``.

        If the records of other hosts show that this machine's own clock is wrong, the refusal's reason becomes
        that. Nothing is recorded or changed for a refusal with another cause, this host, odd names, or beyond
        ``_HOSTS_COMPARED`` hosts.
        """
        own_host = host_name()
        full = len(self._clocks) >= _HOSTS_COMPARED and host not in self._clocks
        unfit = not 0 < len(host) <= _LONGEST_NAME or not host.isprintable()
        if host == own_host or full or unfit or (refusal is not None and not refusal.ahead_s):
            return refusal
        self._clocks[host] = refusal.ahead_s if refusal is not None else 0.0
        if refusal is None:
            return None
        apart = {name: ahead_s for name, ahead_s in self._clocks.items() if ahead_s}
        wrong = own_clock_is_wrong(apart, len(self._clocks) - len(apart), f"{own_host} (the coordinator)")
        return refusal._replace(reason=wrong) if wrong else refusal

    async def _attach(self, frames: wire.FrameStream, seals: wire.Seals, peer: str) -> None:
        """Serve an agent's stream to its end: pass its reports to the listener, and send queued commands.

        The first report must be a Joined. At the end the node's link is removed, unless a newer stream replaced it.
        The disconnect is then reported, unless the agent was ordered to attach again.
        """
        reports = self._decoded(self._opened(frames, seals, peer), peer)
        link, tasks = None, list[asyncio.Task[object]]()
        try:
            async for first in reports:
                link = self._attached_link(first, peer, seals.token_name)
                break
            if link is None:
                return
            writing = asyncio.create_task(_write(link, frames, seals))
            reading = asyncio.create_task(self._read(link, reports, peer))
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

    async def _opened(self, frames: wire.FrameStream, seals: wire.Seals, peer: str) -> AsyncIterator[bytes]:
        """Yield the unsealed messages of a stream until it ends. A forged or malformed message ends it too, counted
        as refused.
        """
        try:
            while (sealed := await frames.receive(MAX_REPORT_BYTES + wire.SEAL_BYTES)) != END:
                yield seals.incoming.open(sealed)
        except wire.ForgedError as error:
            self._refuse("forged message", peer, str(error))
        except wire.MessageError as error:
            self._refuse("malformed message", peer, str(error))
        except wire.EndedError:
            return

    async def _decoded(self, requests: AsyncIterator[bytes], peer: str) -> AsyncIterator[m.Received]:
        """Yield the reports of a stream. A message that cannot be decoded is counted as refused and skipped."""
        async for body in requests:
            try:
                yield m.decode_report(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._refuse("malformed message", peer, str(error)[:200])

    def _attached_link(self, first: m.Received, peer: str, token_name: str) -> AgentLink | None:
        """Attach the stream that begins with ``first``, pass that on, and return the link; None if it is no Joined.

        An older stream of the node is closed. If an agent of a higher incarnation is attached, this one gets a
        Fence, and its link is returned closed.
        """
        if not isinstance(first, m.Joined):
            self._refuse("stream that does not begin with Joined", peer)
            return None
        link = AgentLink(first.node, first.incarnation, token_name)
        before = self.links.get(first.node)
        if before is not None and before.incarnation > first.incarnation:
            self._refuse("superseded incarnation", f"{first.node} at {peer}")
            link.send(m.encode(c.Fence("a newer agent of this node is attached", first.incarnation)))
            link.close()
            return link
        self.links[first.node] = link
        self._unnotified.add(first.node)
        if before is not None:
            before.close()
        self.listener.on_report(first)
        return link

    async def _read(self, link: AgentLink, reports: AsyncIterator[m.Received], peer: str) -> None:
        """Pass the reports of a link to the listener until another stream of the node replaces it.

        Reports about other nodes are counted as refused. A Joined updates the link's incarnation.
        """
        async for report in reports:
            if self.links.get(link.node) is not link:
                return
            if isinstance(report, m.Joined) and report.node == link.node:
                link.incarnation = report.incarnation
            if _is_about_sender(report, link.node):
                self.listener.on_report(report)
            else:
                self._refuse(
                    "message that speaks for others", f"{link.node} at {peer}", type(report).__name__
                )

    async def _operate(self, frames: wire.FrameStream, seals: wire.Seals, peer: str) -> None:
        """Receive one operator's request on a stream, and send the answer.

        A malformed request is counted as refused and not answered. A client that ends the stream first only checked
        who coordinates.
        """
        body = await anext(self._opened(frames, seals, peer), END)
        if body == END:  # A program that only checks who coordinates the run.
            return
        try:
            operation = m.decode_report(body)
            if not isinstance(operation, m.OperatorRequest):
                raise msgspec.ValidationError(f"{type(operation).__name__} is no operation")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._refuse("malformed message", peer, str(error)[:200])
            return
        answer = await self.listener.on_operation(operation)
        await frames.send(seals.outgoing.close(answer.encode()))


def _is_about_sender(report: m.Received, node: str) -> TypeGuard[m.AgentMessage]:
    """Return True if an agent may send this report: it names the agent's own node or none, or is a ``Suspect``.

    Operators' requests, and the ``Folded`` and ``Rollcall`` events that only this process makes, are False.
    """
    if isinstance(report, m.Suspect):
        return True
    return (
        not isinstance(report, m.OperatorRequest | m.Folded | m.Rollcall)
        and getattr(report, "node", node) == node
    )


async def _write(link: AgentLink, frames: wire.FrameStream, seals: wire.Seals) -> None:
    """Send the link's queued commands, sealed, until the stream ends."""
    with suppress(wire.WireError):
        while True:
            sealed = seals.outgoing.close(await link.queue.get())
            await frames.send(sealed, MAX_COMMAND_BYTES + wire.SEAL_BYTES)


async def _flushed(link: AgentLink, writing: asyncio.Task[None]) -> None:
    """Wait until the link's queue is empty, its writer has ended, or 0.2 s have passed: the last commands (a
    Fence, a Shutdown) are to be sent.
    """
    if link.queue.empty():
        await asyncio.sleep(0)
    with suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_S):
            while not link.queue.empty() and not writing.done():
                await asyncio.sleep(0.01)

"""A fleet's server and agents of it on this machine's loopback, for tests of what passes between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import (
    END,
    Credentials,
    Facts,
    Greeting,
    HandshakeStream,
    TurnedAwayError,
    connect,
)
from phalanx.fleet.control.transport import AgentLink, FleetServer
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.run.identity import FencingToken
from phalanx.wire.messages import WireError

CREDENTIALS = Credentials(
    "run-1", "a token that nobody guesses", FencingToken(1, "ab"), operator_token="known to operators"
)


PATIENCE_S = 200.0


def joined(node: str = "node-0", incarnation: int = 1) -> m.Joined:
    return m.Joined(node, incarnation, 1, "127.0.0.1", 4000)


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.reports: list[m.AgentMessage] = []
        self.lost_nodes: list[str] = []
        self.lines: list[str] = []

    def on_report(self, report: m.AgentMessage) -> None:
        self.reports.append(report)

    def on_disconnect(self, link: AgentLink) -> None:
        self.lost_nodes.append(link.node)

    async def on_operation(self, operation: m.OperatorRequest) -> str:
        return f"heard {operation}"

    def log(self, line: str) -> None:
        self.lines.append(line)


class Caller:
    """An agent's end that remembers."""

    def __init__(
        self,
        *addresses: str,
        credentials: Credentials = CREDENTIALS,
        node: str = "node-0",
        incarnation: int = 1,
    ) -> None:
        self.commands: list[c.Command] = []
        self.lines: list[str] = []
        self.greetings = 0
        self.joined = joined(node, incarnation)
        self.link = CoordinatorLink(
            lambda: addresses, credentials, self.greet, self.commands.append, self.lines.append
        )

    def greet(self) -> list[m.AgentReport]:
        self.greetings += 1
        return [self.joined]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


class Wire:
    """A server, and agents that are cancelled at the end."""

    def __init__(self, credentials: Credentials = CREDENTIALS) -> None:
        self.ear = Ear()
        self.server = FleetServer(credentials, self.ear)
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Wire:
        self.port = await self.server.start("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.stop()

    def dial(self, **how: Any) -> Caller:
        caller = Caller(self.address, **how)
        self.tasks.append(asyncio.create_task(caller.link.run()))
        return caller

    async def refusal(self, facts: Facts) -> str:
        """The code with which a stream is refused whose client sends ``facts`` alone; empty if it is not."""
        try:
            async with opened(self.address) as stream:
                await stream.send(Greeting("Attach", facts))
                while True:
                    await stream.receive()
        except TurnedAwayError as error:
            return error.code
        except WireError:
            return ""

    async def raw(self, *bodies: bytes, facts: Facts | None = None, proven: bool = True) -> None:
        """Sends bytes, sealed after a handshake or as they are, until the server ends the stream."""
        with suppress(WireError):
            async with opened(self.address) as stream:
                # Made now, not when this file was read: they hold the time, and a clock of minutes ago is refused.
                await stream.send(Greeting("Attach", CREDENTIALS.facts() if facts is None else facts))
                seals = await CREDENTIALS.prove(stream, "Attach", "client") if proven else None
                for body in bodies:
                    await stream.frames.send(seals.outgoing.close(body) if seals else body)
                await stream.frames.send(END)
                while True:
                    await stream.frames.receive()


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[HandshakeStream]:
    """A stream to a server, before its handshake."""
    frames = await connect(address, None)
    try:
        yield HandshakeStream(frames)
    finally:
        frames.close()

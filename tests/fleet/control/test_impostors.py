"""Programs that listen where the coordinator was, or sit in between: agents send them nothing and obey none of their orders."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.control.wire import CREDENTIALS, Caller, Ear, Wire, opened, until
from fleet.fleet_processes import FLEET, make_run
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import (
    Credentials,
    Greeting,
    HandshakeStream,
    Method,
    TurnedAwayError,
    connect,
    credentials_of,
)
from phalanx.fleet.control.fleet_file import read_fleet_file
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.fleet.control.transport import TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.invariants import JournalError
from phalanx.wire.messages import HELLO_BYTES, FrameStream, WireError

SHUTDOWN = m.encode(c.Shutdown("an impostor says: go home"))
Handler = Callable[[FrameStream, Callable[[bytes], None]], Awaitable[None]]
"""The behavior of a false server on a stream, with a function that records received bytes."""


class Impostor:
    """A server that knows no token, and writes down all that it is sent."""

    def __init__(self, behave: Handler) -> None:
        self.behave, self.received = behave, list[bytes]()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        """Its address."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            frames = FrameStream(reader, writer)
            with suppress(WireError, asyncio.CancelledError):
                await self.behave(frames, self.received.append)
            frames.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port)
        yield "{}:{}".format(*server.sockets[0].getsockname()[:2])
        server.close()

    def check_that_it_learned_nothing(self) -> None:
        content = b"\n".join(self.received)
        assert content
        assert CREDENTIALS.token.encode() not in content
        assert b"Joined" not in content
        assert b"StopRun" not in content


async def at_once(frames: FrameStream, note: Callable[[bytes], None]) -> None:
    """Gives orders without any handshake."""
    note(await frames.receive())
    for _ in range(4):
        await frames.send(SHUTDOWN)


async def by_guesses(frames: FrameStream, note: Callable[[bytes], None]) -> None:
    """Answers in the form of the handshake, with what it was sent itself, then gives orders."""
    note(await frames.receive())
    for _ in range(2):
        note(body := await frames.receive())
        await frames.send(body)
    for _ in range(4):
        await frames.send(SHUTDOWN)


async def by_silence(frames: FrameStream, note: Callable[[bytes], None]) -> None:
    """Ends the stream as soon as it has begun."""
    note(await frames.receive())


@pytest.mark.parametrize("behave", [at_once, by_guesses, by_silence])
def test_an_impostor_learns_nothing_is_not_obeyed_and_the_next_address_is_tried(behave: Handler) -> None:
    async def scene() -> None:
        impostor = Impostor(behave)
        async with impostor.listening() as false, Wire() as wire:
            caller = Caller(false, wire.address)
            wire.tasks.append(asyncio.create_task(caller.link.run()))
            await until(lambda: wire.ear.reports)
            wire.server.send("node-0", c.Release(1))
            await until(lambda: caller.commands)
            assert caller.commands == [c.Release(1)]
            assert any(false in line for line in caller.lines), caller.lines
            with pytest.raises(TransportError):
                await operate(false, CREDENTIALS, m.StopRun(), timeout_s=20.0)
        impostor.check_that_it_learned_nothing()

    asyncio.run(scene())


def relay(
    to: Callable[[], str], up: dict[int, bytes], down: dict[int, bytes], becomes: Method = "Attach"
) -> Handler:
    """Passes everything on to another server, but for the frames of these numbers after the greeting, which it replaces."""

    async def behave(frames: FrameStream, note: Callable[[bytes], None]) -> None:
        note(await frames.receive())
        far = await connect(to(), None)
        await HandshakeStream(far).send(Greeting(becomes, CREDENTIALS.facts()))

        async def pass_on(source: FrameStream, target: FrameStream, replaced: dict[int, bytes]) -> None:
            for number in itertools.count():
                body = await source.receive()
                note(body)
                await target.send(replaced.get(number, body))

        passing = [
            asyncio.create_task(pass_on(frames, far, up)),
            asyncio.create_task(pass_on(far, frames, down)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        far.close()

    return behave


FORGED = b"\0" * 16


def test_an_order_that_a_relay_has_replaced_is_not_obeyed() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            # Messages 0 and 1 of the server are the handshake.
            impostor = Impostor(relay(lambda: wire.address, {}, {3: FORGED + SHUTDOWN}))
            async with impostor.listening() as between:
                caller = Caller(between)
                wire.tasks.append(asyncio.create_task(caller.link.run()))
                await until(lambda: wire.ear.reports)
                for epoch in range(3):
                    wire.server.send("node-0", c.Release(epoch))
                await until(lambda: any("altered" in line for line in caller.lines))
                assert c.Shutdown not in [type(command) for command in caller.commands]
                assert caller.commands[0] == c.Release(0)

    asyncio.run(scene())


def test_a_report_that_a_relay_has_replaced_is_dropped() -> None:
    async def scene() -> None:
        false = m.encode(m.RunFinished(0, "{}"))
        async with Wire() as wire:
            # Messages 0 and 1 of the client are the handshake, and 2 is its Joined.
            impostor = Impostor(relay(lambda: wire.address, {3: FORGED + false}, {}))
            async with impostor.listening() as between:
                caller = Caller(between)
                wire.tasks.append(asyncio.create_task(caller.link.run()))
                await until(lambda: wire.ear.reports)
                caller.link.send(m.Durable("node-0", 1, 0, 7))
                await until(lambda: wire.server.refused["forged message"])
                assert {type(report) for report in wire.ear.reports} == {m.Joined}

    asyncio.run(scene())


def test_the_proof_of_an_agent_is_none_for_an_operators_request() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            impostor = Impostor(relay(lambda: wire.address, {}, {}, becomes="Operate"))
            async with impostor.listening() as between:
                caller = Caller(between)
                wire.tasks.append(asyncio.create_task(caller.link.run()))
                await until(lambda: wire.server.refused["wrong token"])
                assert wire.ear.reports == []

    asyncio.run(scene())


def test_a_server_proves_nothing_to_a_client_that_has_not_proven_itself() -> None:
    async def scene() -> None:
        async with Wire() as wire, opened(wire.address) as stream:
            await stream.send(Greeting("Attach", CREDENTIALS.facts()))
            stranger = replace(CREDENTIALS, token="another token, of a stranger")
            with pytest.raises(TurnedAwayError, match="unauthenticated"):
                await stranger.prove(stream, "Attach", "client")

    asyncio.run(scene())


# --- a coordinator that comes back ----------------------------------------------------------------


@asynccontextmanager
async def coordinating(run_dir: Path, credentials: Credentials) -> AsyncIterator[Coordinator]:
    """A coordinator of the run, killed at the end as far as one can within a process."""
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    coordinator = Coordinator(CoordinatorArgs(run_dir, 0, "127.0.0.1", 0), spec, credentials)
    before = (run_dir / "fleet.json").stat().st_mtime_ns if (run_dir / "fleet.json").exists() else 0
    task = asyncio.create_task(coordinator.run())
    await until(
        lambda: (
            task.done()
            or ((run_dir / "fleet.json").exists() and (run_dir / "fleet.json").stat().st_mtime_ns > before)
        )
    )
    try:
        if task.done():
            task.result()
        yield coordinator
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
        await coordinator._server.stop(0.0)


def test_a_coordinator_whose_port_was_taken_serves_at_another_and_its_agents_find_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    (run_dir / "fleet.token").write_text(secrets.token_hex(16))
    credentials = credentials_of(run_dir, spec, 0, None)

    async def scene() -> None:
        impostor = Impostor(at_once)
        async with coordinating(run_dir, credentials):
            first = read_fleet_file(run_dir).coordinator
        port = int(first.rpartition(":")[2])
        async with impostor.listening(port), coordinating(run_dir, credentials) as second:
            address = read_fleet_file(run_dir).coordinator
            assert address != first
            caller = Caller(first, address, credentials=credentials)
            attaching = asyncio.create_task(caller.link.run())
            await until(lambda: second._server.links)
            assert c.Shutdown not in [type(command) for command in caller.commands]
            attaching.cancel()

    asyncio.run(scene())


def test_a_coordinator_takes_no_other_port_while_another_of_its_run_lives(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    (run_dir / "fleet.token").write_text(secrets.token_hex(16))
    credentials = credentials_of(run_dir, spec, 0, None)

    async def scene() -> None:
        async with coordinating(run_dir, credentials):
            with pytest.raises(TransportError, match="another coordinator of this run"):
                async with coordinating(run_dir, credentials):
                    pass

    asyncio.run(scene())


def test_a_coordinator_does_not_take_up_the_journal_of_another_run_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    spec = make_run(run_dir, replace(FLEET, nodes=2))
    args = CoordinatorArgs(run_dir, 0, "127.0.0.1", 0)
    (run_dir / "fleet.token").write_text(secrets.token_hex(16))
    Coordinator(args, spec, credentials_of(run_dir, spec, 0, None))
    edited = replace(spec, fleet=replace(spec.fleet, lease_s=7.0))
    with pytest.raises(JournalError, match=r"has changed since this start .*start the run again"):
        Coordinator(args, edited, credentials_of(run_dir, edited, 0, None))


def test_a_handshake_is_bounded_in_time_by_whoever_waits() -> None:
    impatient = replace(CREDENTIALS, handshake_timeout_s=1.0)

    async def scene() -> None:
        async with Wire(impatient) as wire, opened(wire.address) as stream, opened(wire.address) as mute:
            await stream.send(Greeting("Attach", CREDENTIALS.facts()))
            assert len(await stream.read()) == HELLO_BYTES
            with pytest.raises(WireError):
                await mute.receive()
            await until(lambda: wire.server.refused["wrong token"])  # though it sent nothing
            friend = wire.dial()
            await until(lambda: friend.link.attached)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and sends nothing
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            caller = Caller(address, credentials=impatient)
            dialing = asyncio.create_task(caller.link.run())
            await until(lambda: caller.lines)
            dialing.cancel()
        assert Ear().reports == []

    asyncio.run(scene())

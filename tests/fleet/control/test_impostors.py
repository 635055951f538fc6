"""Programs that listen where the coordinator was, or sit in between: agents tell them nothing and obey them in nothing."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from fleet.control.wire import CREDENTIALS, Caller, ClientStream, Ear, Wire, until
from fleet.fleet_processes import FLEET, make_run
from phalanx.fleet.control.coordinator import Coordinator
from phalanx.fleet.control.coordinator_args import CoordinatorArgs
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.fleet_file import read_fleet_file
from phalanx.fleet.control.transport import SERVICE, TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.replay import JournalError
from phalanx.wire.messages import UnprovenError
from phalanx.wire.token_proof import HELLO_BYTES

SHUTDOWN = m.encode(c.Shutdown("an impostor says: go home"))
Handler = Callable[[str, AsyncIterator[bytes], Any], Any]


class Impostor:
    """A gRPC server that knows no token, and writes down all that it is sent."""

    def __init__(self, behave: Handler) -> None:
        self.behave, self.heard = behave, list[bytes]()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        """Its address."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

        def method(name: str) -> Any:
            async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
                self.heard += [
                    value if isinstance(value, bytes) else value.encode()
                    for _, value in context.invocation_metadata()
                ]
                await self.behave(name, self.overheard(requests), context)

            return grpc.stream_stream_rpc_method_handler(serve)

        methods = {name: method(name) for name in ("Attach", "Operate")}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        yield f"127.0.0.1:{bound}"
        await server.stop(0.0)

    async def overheard(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for body in requests:
            self.heard.append(body)
            yield body

    def check_that_it_learned_nothing(self) -> None:
        said = b"\n".join(self.heard)
        assert said
        assert CREDENTIALS.token.encode() not in said
        assert b"Joined" not in said
        assert b"StopRun" not in said


async def at_once(_method: str, _requests: AsyncIterator[bytes], context: Any) -> None:
    """Gives orders without any handshake."""
    for _ in range(4):
        await context.write(SHUTDOWN)


async def by_guesses(_method: str, requests: AsyncIterator[bytes], context: Any) -> None:
    """Answers in the form of the handshake, with what it was sent itself, then gives orders."""
    hello = await anext(requests)
    await context.write(hello)
    await context.write(await anext(requests))
    for _ in range(4):
        await context.write(SHUTDOWN)


async def by_silence(_method: str, _requests: AsyncIterator[bytes], _context: Any) -> None:
    """Ends the stream as soon as it has begun."""


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


def relay(to: Callable[[], str], up: dict[int, bytes], down: dict[int, bytes], becomes: str = "") -> Handler:
    """Passes everything on to another server, but for the messages of these numbers, which it replaces."""

    async def behave(method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        async with grpc.aio.insecure_channel(to()) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{becomes or method}")(metadata=CREDENTIALS.metadata())

            async def pass_up() -> None:
                number = 0
                async for body in requests:
                    await call.write(up.get(number, body))
                    number += 1

            passing = asyncio.create_task(pass_up())
            number = 0
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                while (body := await call.read()) is not grpc.aio.EOF:
                    await context.write(down.get(number, body))
                    number += 1
            passing.cancel()
            call.cancel()

    return behave


FORGED = b"\0" * 16


def test_an_order_that_a_relay_has_replaced_is_not_obeyed() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            # Of the server's messages, 0 and 1 are the handshake.
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


def test_a_report_that_a_relay_has_replaced_is_not_heard() -> None:
    async def scene() -> None:
        false = m.encode(m.RunFinished(0, "{}"))
        async with Wire() as wire:
            # Of the client's messages, 0 and 1 are the handshake, and 2 is its Joined.
            impostor = Impostor(relay(lambda: wire.address, {3: FORGED + false}, {}))
            async with impostor.listening() as between:
                caller = Caller(between)
                wire.tasks.append(asyncio.create_task(caller.link.run()))
                await until(lambda: wire.ear.reports)
                caller.link.say(m.Durable("node-0", 1, 0, 7))
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
        async with Wire() as wire, grpc.aio.insecure_channel(wire.address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Attach")(metadata=CREDENTIALS.metadata())
            stranger = replace(CREDENTIALS, token="another token, of a stranger")
            with pytest.raises((UnprovenError, grpc.RpcError)):
                await stranger.prove(ClientStream(call), "Attach", "client")
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

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
            found = read_fleet_file(run_dir).coordinator
            assert found != first
            caller = Caller(first, found, credentials=credentials)
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
    impatient = replace(CREDENTIALS, handshake_timeout_s=0.3)

    async def scene() -> None:
        async with Wire(impatient) as wire, grpc.aio.insecure_channel(wire.address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Attach")(metadata=CREDENTIALS.metadata())
            assert len(await call.read()) == HELLO_BYTES
            await until(lambda: wire.server.refused["wrong token"])  # though nothing was said
            friend = wire.dial()
            await until(lambda: friend.link.attached)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            caller = Caller(address, credentials=impatient)
            dialing = asyncio.create_task(caller.link.run())
            await until(lambda: caller.lines)
            dialing.cancel()
        assert Ear().reports == []

    asyncio.run(scene())

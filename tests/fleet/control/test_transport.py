"""The wire: messages are handled in the order in which they were sent, and no message can do harm."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fleet.control.wire import CREDENTIALS, Caller, Ear, Wire, joined, opened, until
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import Greeting
from phalanx.fleet.control.transport import MAX_REPORT_BYTES, FleetServer, TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.wire.messages import EndedError, encode


def test_reports_and_commands_arrive_in_order() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            caller = wire.dial()
            await until(lambda: wire.server.links)
            steps = [m.Heartbeat("node-0", 1, 0, step, m.WorkerPhase.BOUND) for step in range(50)]
            for beat in steps:
                caller.link.send(beat)
            orders = [c.Park(epoch, "because") for epoch in range(50)]
            for order in orders:
                wire.server.send("node-0", order)
            await until(lambda: len(wire.ear.reports) == 51 and len(caller.commands) == 50)
            assert wire.ear.reports == [joined(), *steps]
            assert caller.commands == orders

    asyncio.run(scene())


def test_another_version_of_the_vocabulary_is_refused() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            facts = tuple((k, "999" if k == "phalanx-version" else v) for k, v in CREDENTIALS.facts())
            assert await wire.refusal(facts) == "unauthenticated"

    asyncio.run(scene())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b'{"type":"Nonsense"}',
        b'{"type":"Durable","node":"\xff","incarnation":1,"epoch":0,"step":7}',
        b'{"type":"Tick"}',
        b'{"type":"Heartbeat","node":"node-0","incarnation":-1,"epoch":0,"step":0,"phase":"bound"}',
        m.encode(m.Heartbeat("node-9", 1, 0, 5, m.WorkerPhase.BOUND)),
        m.encode(m.StopRun()),
        m.encode(m.Folded((m.Tick(),))),
    ],
)
def test_a_message_that_is_no_report_of_this_node_is_refused_and_the_next_one_is_handled(body: bytes) -> None:
    async def scene() -> None:
        async with Wire() as wire:
            await wire.raw(m.encode(joined()), body, m.encode(m.Durable("node-0", 1, 0, 7)))
            await until(lambda: len(wire.ear.reports) == 2 and wire.ear.lost_nodes)
            assert wire.ear.reports[1] == m.Durable("node-0", 1, 0, 7)
            assert sum(wire.server.refused.values()) == 1

    asyncio.run(scene())


def test_a_stream_that_does_not_begin_with_joined_is_closed() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            await wire.raw(m.encode(m.Durable("node-0", 1, 0, 7)))
            assert (wire.ear.reports, wire.ear.lost_nodes, wire.server.links) == ([], [], {})

    asyncio.run(scene())


def test_an_oversized_message_ends_its_stream_and_no_other() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            friend = wire.dial(node="node-1")
            await until(lambda: wire.ear.reports)
            await wire.raw(m.encode(joined()), b"x" * (MAX_REPORT_BYTES + 1))
            assert wire.server.refused["malformed message"] == 1
            friend.link.send(m.Durable("node-1", 1, 0, 7))
            await until(lambda: m.Durable("node-1", 1, 0, 7) in wire.ear.reports)
            assert friend.greetings == 1

    asyncio.run(scene())


def test_an_agent_whose_report_is_too_long_attaches_again_without_it() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            caller = wire.dial()
            await until(lambda: wire.ear.reports)
            caller.link.send(m.Fatal(0, "node-0", "x" * (MAX_REPORT_BYTES + 1), "DataError"))
            await until(lambda: caller.greetings == 2 and caller.link.attached)
            assert any("more than" in line for line in caller.lines)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "greeting",
    [b"", b"\xc1", encode(Greeting("Attach", (("name", "value"),))).replace(b"value", b"\xffalue")],
)
def test_what_is_no_greeting_is_refused_and_counted(greeting: bytes) -> None:
    async def scene() -> None:
        async with Wire() as wire, opened(wire.address) as stream:
            await stream.frames.send(greeting)
            with pytest.raises(EndedError):
                await stream.receive()
            assert wire.server.refused["malformed message"] == 1

    asyncio.run(scene())


def test_bytes_that_are_no_frames_harm_nobody() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            friend = wire.dial()
            await until(lambda: wire.ear.reports)
            for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b""):
                with socket.create_connection(("127.0.0.1", wire.port)) as stranger:
                    stranger.sendall(noise)
            friend.link.send(m.Durable("node-0", 1, 0, 7))
            await until(lambda: len(wire.ear.reports) == 2)

    asyncio.run(scene())


def test_an_agent_attaches_again_when_the_coordinator_comes_back_and_reports_its_state() -> None:
    async def scene() -> None:
        async with Wire() as first:
            caller = first.dial()
            await until(lambda: first.ear.reports)
            await first.server.stop()
            second_ear = Ear()
            second = FleetServer(CREDENTIALS, second_ear)
            assert await second.start("127.0.0.1", first.port) == first.port
            await until(lambda: second_ear.reports)
            assert second_ear.reports == [joined()]
            assert caller.greetings == 2
            await second.stop()

    asyncio.run(scene())


def test_an_agent_is_led_by_a_coordinator_that_claims_to_lead_and_attached_to_a_candidate_that_does_not() -> (
    None
):
    async def scene() -> None:
        async with Wire() as wire:
            caller = wire.dial()
            await until(lambda: wire.ear.reports)
            assert caller.link.attached
            assert not caller.link.led
            wire.server.lead(3)  # it was elected
            await until(lambda: caller.link.led)
            later = wire.dial(node="node-1")
            await until(lambda: len(wire.ear.reports) == 2)
            assert not later.link.led  # not before the coordinator has decided with it
            wire.server.lead(3)
            await until(lambda: later.link.led)
            assert caller.commands == []

    asyncio.run(scene())


def test_an_agent_that_has_followed_a_later_reign_obeys_no_earlier_one_and_looks_further() -> None:
    async def scene() -> None:
        async with Wire() as old, Wire() as new:
            caller = Caller(new.address, old.address)
            new.tasks.append(asyncio.create_task(caller.link.run()))
            await until(lambda: new.ear.reports)
            new.server.lead(2)
            await until(lambda: caller.link.led)
            caller.link.drop("a test")
            await until(lambda: old.ear.reports)
            old.server.lead(1)
            old.server.send("node-0", c.Park(0, "of an earlier reign"))
            await until(lambda: len(new.ear.reports) == 2)
            assert caller.commands == []
            assert any("was superseded" in line for line in caller.lines)

    asyncio.run(scene())


def test_a_newer_life_of_a_node_takes_the_place_of_the_older_and_the_older_one_is_expelled() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            new = wire.dial(incarnation=2)
            await until(lambda: wire.ear.reports)
            old = wire.dial(incarnation=1)
            await until(lambda: old.commands)
            assert isinstance(old.commands[0], c.Fence)
            wire.server.send("node-0", c.Release(1))
            await until(lambda: new.commands)
            assert new.commands == [c.Release(1)]
            assert wire.ear.lost_nodes == []

    asyncio.run(scene())


def test_an_agent_that_reads_nothing_is_cut_off_and_holds_up_nobody() -> None:
    async def scene() -> None:
        async with Wire() as wire, opened(wire.address) as stream:
            await stream.send(Greeting("Attach", CREDENTIALS.facts()))
            seals = await CREDENTIALS.prove(stream, "Attach", "client")
            await stream.frames.send(seals.outgoing.close(m.encode(joined())))
            await until(lambda: wire.server.links)
            for _ in range(600):  # all at once: no turn of the loop in which one could leave
                wire.server.send("node-0", c.Park(1, "x" * 1000))
            await until(lambda: wire.ear.lost_nodes == ["node-0"])

    asyncio.run(scene())


def test_an_operator_is_answered() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            assert "node-3" in await operate(wire.address, CREDENTIALS, m.Drain("node-3"))
        with pytest.raises(TransportError, match="phalanx status"):
            await operate("127.0.0.1:1", CREDENTIALS, m.StopRun(), timeout_s=1.0)

    asyncio.run(scene())


def test_a_taken_port_is_an_error_that_names_it() -> None:
    async def scene() -> None:
        async with Wire() as wire:
            with pytest.raises(TransportError, match=rf"{wire.port}.*fleet\.port"):
                await FleetServer(CREDENTIALS, Ear()).start("127.0.0.1", wire.port)

    asyncio.run(scene())


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error_that_names_the_option(host: str) -> None:
    with pytest.raises(TransportError, match=rf"{host}.*--host"):
        asyncio.run(FleetServer(CREDENTIALS, Ear()).start(host, 0))

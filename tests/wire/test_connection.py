"""Connections of threads: what is sent arrives, and whatever is no message, too long, late or altered is refused by name."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.wire.connection import FramedConnection, SealedConnection, authenticate
from phalanx.wire.messages import (
    LONGEST_MESSAGE_BYTES,
    EndedError,
    ForgedError,
    MessageDecoder,
    MessageError,
    Seal,
    SealedStream,
    Seals,
    SilentError,
    UnprovenError,
    WireError,
    sealed_stream,
)

TOKEN, PURPOSE, PATIENCE_S = "a token that only the peers know", "test connection, version 1", 60.0


class Numbers(msgspec.Struct, frozen=True, tag=True):
    """A message: so many raw bytes follow."""

    nbytes: int


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """A message without fields."""


MESSAGES: MessageDecoder[Numbers | Farewell] = MessageDecoder(Numbers | Farewell)


@contextmanager
def connected() -> Iterator[tuple[FramedConnection, FramedConnection]]:
    near, far = socket.socketpair()
    with near, far:
        yield FramedConnection(near, "near"), FramedConnection(far, "far")


@contextmanager
def proven() -> Iterator[tuple[SealedConnection, SealedConnection]]:
    with connected() as (near, far), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(authenticate, far, TOKEN, "server", PURPOSE)
        ours = authenticate(near, TOKEN, "client", PURPOSE)
        yield SealedConnection(near, ours), SealedConnection(far, theirs.result())


def test_a_connection_that_this_end_has_closed_fails_as_any_other_under_a_deadline_too() -> None:
    with connected() as (_, far):
        far.set_deadline(PATIENCE_S)
        far.close()
        with pytest.raises(WireError):
            far.receive(1)


@settings(max_examples=25, deadline=None)
@given(bodies=st.lists(st.binary(max_size=3000), max_size=4))
def test_messages_and_their_raw_bytes_arrive_in_their_order(bodies: list[bytes]) -> None:
    with connected() as (near, far), proven() as (client, server):
        for body in bodies:
            near.send_message(Numbers(len(body)), body)
            client.send_message(Numbers(len(body)), body)
        for body in bodies:
            assert far.receive_message(MESSAGES) == Numbers(len(body))
            assert far.receive(len(body)) == body
            assert server.receive_message(MESSAGES) == Numbers(len(body))
            assert server.receive_body(len(body)) == body


def test_a_connection_that_ends_between_messages_is_no_error_and_one_that_ends_within_one_is() -> None:
    with connected() as (near, far):
        near.send_message(Farewell())
        near.close()
        assert far.receive_message_or_end(MESSAGES) == Farewell()
        assert far.receive_message_or_end(MESSAGES) is None
    with connected() as (near, far):
        near.send(b"\x05\x00")
        near.close()
        with pytest.raises(EndedError, match="2 bytes too early"):
            far.receive_message_or_end(MESSAGES)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<I", LONGEST_MESSAGE_BYTES + 1), "allowed"),
        (struct.pack("<I", 3) + b"abc", "not of this protocol"),
        (struct.pack("<I", 7) + msgspec.msgpack.encode({"a": 1, "b": 2}), "not of this protocol"),
        (struct.pack("<I", 2000) + b"\x91" * 2000, "not of this protocol"),
        (struct.pack("<I", 3) + b"\xa2\xff\xff", "not of this protocol"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_peers_name(sent: bytes, reason: str) -> None:
    with connected() as (near, far):
        near.send(sent)
        with pytest.raises(MessageError, match=f"^far: .*{reason}"):
            far.receive_message(MESSAGES)


def test_a_message_that_nobody_would_accept_is_not_sent() -> None:
    with connected() as (near, _), pytest.raises(MessageError):
        near.send_frame(bytes(LONGEST_MESSAGE_BYTES + 1))


def test_a_silent_peer_is_told_apart_from_one_that_has_ended() -> None:
    with connected() as (near, far):
        far.set_timeout(0.01)
        with pytest.raises(SilentError):
            far.receive(1)
        far.set_deadline(0.0)
        with pytest.raises(SilentError):
            far.receive(1)
        near.close()
        far.set_timeout(PATIENCE_S)
        with pytest.raises(EndedError):
            far.receive(1)


@settings(max_examples=25, deadline=None)
@given(place=st.integers(0, 30), mask=st.integers(0, 255))
def test_a_sealed_message_that_was_altered_anywhere_is_refused(place: int, mask: int) -> None:
    def seals() -> Seals:
        return Seals(Seal(b"the key of one direction"), Seal(b"the key of one direction"))

    with connected() as (sender, between), connected() as (relay, receiver):
        SealedConnection(sender, seals()).send_message(Numbers(123456))
        frame = bytearray(between.receive_frame())
        frame[place % len(frame)] ^= mask
        relay.send_frame(bytes(frame))
        with pytest.raises(ForgedError, match=r"^far: ") if mask else nullcontext():
            assert SealedConnection(receiver, seals()).receive_message(MESSAGES) == Numbers(123456)


def test_a_peer_with_another_token_is_refused_by_both_ends() -> None:
    with connected() as (near, far), ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            try:
                authenticate(far, "another token", "server", PURPOSE)
            finally:
                far.close()

        theirs = pool.submit(serve)
        with pytest.raises(UnprovenError, match="give every node the same one"):
            authenticate(near, TOKEN, "client", PURPOSE)
        with pytest.raises(UnprovenError):
            theirs.result()


def test_a_thread_and_an_event_loop_understand_each_other() -> None:
    near, far = socket.socketpair()

    def thread() -> object:
        with near:
            raw = FramedConnection(near, "the loop")
            peer = SealedConnection(raw, authenticate(raw, TOKEN, "client", PURPOSE))
            peer.send_message(Numbers(1))
            answer = peer.receive_message(MESSAGES)
            peer.raw.send_frame(b"no seal, and no message")
            return answer

    async def loop() -> None:
        answer = asyncio.create_task(asyncio.to_thread(thread))
        stream = await accepted(far)
        assert await stream.receive_message(MESSAGES) == Numbers(1)
        stream.send_message(Farewell())
        with pytest.raises(ForgedError):
            await stream.receive_message(MESSAGES)
        with pytest.raises(EndedError):
            await stream.receive_message(MESSAGES)
        assert await answer == Farewell()
        stream.close()

    asyncio.run(loop())


def test_a_client_that_does_not_prove_itself_in_time_is_given_up_by_the_event_loop() -> None:
    async def loop() -> None:
        near, far = socket.socketpair()
        with near, pytest.raises(WireError):
            await accepted(far, within_s=0.05)

    asyncio.run(loop())


async def accepted(connection: socket.socket, within_s: float = PATIENCE_S) -> SealedStream:
    reader, writer = await asyncio.open_connection(sock=connection)
    return await sealed_stream(reader, writer, TOKEN, PURPOSE, within_s)

"""A port at which peers prove themselves: strangers keep nobody out, and the handshake has one deadline."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import UnprovenError, WireError
from phalanx.wire.port import Doorway, ProvenPort

TOKEN, PURPOSE, PATIENCE_S = "a token that only the peers know", "test port, version 1", 60.0


def echo(peer: SealedConnection) -> None:
    """Send back every frame."""
    while True:
        peer.raw.send_frame(peer.raw.receive_frame())


@contextmanager
def listening(**options: object) -> Iterator[ProvenPort]:
    with closing(ProvenPort(echo, "echo", PURPOSE, TOKEN, **options)) as port:  # type: ignore[arg-type]
        yield port


@contextmanager
def client(port: ProvenPort, token: str = TOKEN, purpose: str = PURPOSE) -> Iterator[SealedConnection]:
    with socket.create_connection(("127.0.0.1", port.port), PATIENCE_S) as connection:
        yield sealed(connection, "the port", token, "client", purpose, PATIENCE_S)


def echoes(peer: SealedConnection, body: bytes = b"body") -> bool:
    peer.raw.send_frame(body)
    return peer.raw.receive_frame() == body


def test_peers_that_know_the_token_are_served_each_by_itself() -> None:
    with listening() as port, client(port) as first, client(port) as second:
        assert echoes(second)
        assert echoes(first)


@pytest.mark.parametrize(("token", "purpose"), [("another token", PURPOSE), (TOKEN, "another port")])
def test_a_proof_for_another_token_or_purpose_is_refused(token: str, purpose: str) -> None:
    with listening() as port, pytest.raises(UnprovenError), client(port, token, purpose):
        pass


def test_after_a_change_the_new_token_is_required_and_earlier_ones_as_long_as_they_are_named() -> None:
    with listening() as port:
        earlier = [TOKEN]
        port.change_token("the new token", lambda: earlier)
        with client(port, "the new token") as new, client(port, TOKEN) as old:
            assert echoes(new)
            assert echoes(old)
        earlier.clear()
        with pytest.raises(UnprovenError), client(port, TOKEN):
            pass


def test_closing_ends_connections_that_are_served_and_those_in_their_handshake() -> None:
    with listening() as port, client(port) as served:
        stranger = socket.create_connection(("127.0.0.1", port.port), PATIENCE_S)
        assert echoes(served)
        port.close()
        with stranger, suppress(ConnectionResetError):
            while stranger.recv(1 << 10):  # the port's hello
                pass
        with pytest.raises(WireError):
            served.raw.receive_frame()


def test_a_handshake_that_trickles_is_ended_by_one_deadline_for_the_whole() -> None:
    with (
        listening(handshake_timeout_s=0.3) as port,
        socket.create_connection(("127.0.0.1", port.port), PATIENCE_S) as stranger,
    ):
        sent = 0
        with suppress(ConnectionError):
            for sent in range(72):  # noqa: B007 the handshake would have so many bytes
                stranger.sendall(b"P")
                time.sleep(0.1)
        assert sent < 71


def test_if_newcomers_are_too_many_the_oldest_stranger_makes_room_for_hosts_that_are_known() -> None:
    door = Doorway(2)
    pairs = [socket.socketpair() for _ in range(4)]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    door.leave(door.enter(ours[0], "member"), proven=True)
    member = door.enter(ours[1], "member")
    stranger = door.enter(ours[2], "stranger")
    door.enter(ours[3], "another stranger")
    assert theirs[2].recv(1) == b"", "the stranger's connection has ended, though the member's is older"
    theirs[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs[1].recv(1)
    door.leave(stranger, proven=False)
    door.leave(member, proven=True)
    for end in (*ours, *theirs):
        end.close()


def test_a_port_without_descriptors_waits_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    tries_s: list[float] = []
    third = threading.Event()

    def accept(_socket: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        tries_s.append(time.monotonic())
        if len(tries_s) == 3:
            third.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with listening():
        assert third.wait(PATIENCE_S)
    # A busy machine makes the pauses between tries longer, never shorter.
    assert tries_s[2] - tries_s[0] > 0.2

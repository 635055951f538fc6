"""The proof of a token: two sides that know it agree; nobody else gets anywhere, whatever they repeat or alter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.wire.messages import SEAL_BYTES, ForgedError, Role, Seals, UnprovenError, handshake, token_name

TOKEN, PURPOSE = "a token that nobody guesses", "test of run-1"


def meet(
    client: tuple[str, str, Role] = (TOKEN, PURPOSE, "client"),
    server: tuple[str, str, Role] = (TOKEN, PURPOSE, "server"),
    earlier: tuple[str, ...] = (),
    on_the_way: Callable[[int, bytes], bytes] = lambda _number, body: body,
) -> tuple[Seals, Seals]:
    """Lets two sides talk until both are done; ``on_the_way`` may change what is said."""
    sides = [handshake(*client, earlier), handshake(*server, earlier)]
    waiting: list[int | None] = [None, None]
    inbox: list[list[bytes]] = [[], []]
    done: list[Seals | None] = [None, None]
    said, number = [b"", b""], 0
    for turn in range(40):
        me = turn % 2
        if done[me] is not None or (waiting[me] and not inbox[me]):
            continue
        if waiting[me]:
            said[me] = inbox[me].pop(0)
        try:
            step = sides[me].send(said[me]) if waiting[me] is not None else next(sides[me])
        except StopIteration as end:
            done[me] = end.value
            continue
        if isinstance(step, bytes):
            inbox[1 - me].append(on_the_way(number, step))
            number += 1
            waiting[me] = 0
        else:
            waiting[me] = step
    first, second = done
    assert first is not None, "the client never came to an end"
    assert second is not None, "the server never came to an end"
    return first, second


def test_two_sides_that_know_the_token_can_talk_in_both_directions() -> None:
    client, server = meet()
    for number in range(3):
        assert server.incoming.open(client.outgoing.close(b"up %d" % number)) == b"up %d" % number
        assert client.incoming.open(server.outgoing.close(b"down %d" % number)) == b"down %d" % number


def test_a_server_lets_a_client_in_with_an_earlier_token_and_a_client_never_a_server() -> None:
    old, new = ("the token before", PURPOSE), ("the token of now", PURPOSE)
    client, server = meet((*old, "client"), (*new, "server"), earlier=("one before that", old[0]))
    assert server.incoming.open(client.outgoing.close(b"up")) == b"up"
    assert client.token_name == server.token_name == token_name(old[0])
    with pytest.raises(UnprovenError):
        meet((*old, "client"), (*new, "server"), earlier=("one before that",))
    with pytest.raises(UnprovenError):
        meet((*new, "client"), (*old, "server"), earlier=(old[0],))


@pytest.mark.parametrize(
    "server",
    [
        ("another token of some length", PURPOSE, "server"),
        (TOKEN, "test of run-2", "server"),
        (TOKEN, PURPOSE, "client"),
    ],
)
def test_another_token_purpose_or_role_proves_nothing(server: tuple[str, str, Role]) -> None:
    with pytest.raises(UnprovenError):
        meet(server=server)


@given(st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 255))
def test_a_handshake_of_which_one_bit_was_altered_fails(message: int, place: int, flip: int) -> None:
    def alter(number: int, body: bytes) -> bytes:
        if number != message:
            return body
        at = place % len(body)
        return body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :]

    with pytest.raises(UnprovenError):
        meet(on_the_way=alter)


def test_what_a_client_said_once_proves_nothing_to_a_server_the_next_time() -> None:
    heard: list[bytes] = []

    def overhear(_number: int, body: bytes) -> bytes:
        heard.append(body)
        return body

    meet(on_the_way=overhear)
    hello, _, proof, _ = heard
    server = handshake(TOKEN, PURPOSE, "server")
    next(server)
    server.send(b"")
    server.send(hello)
    with pytest.raises(UnprovenError):
        server.send(proof)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.data())
def test_only_the_next_message_of_its_own_direction_can_be_opened(
    bodies: list[bytes], data: st.DataObject
) -> None:
    client, server = meet()
    sealed = [client.outgoing.close(body) for body in bodies]
    before = data.draw(st.integers(0, len(bodies) - 1))
    for one, body in zip(sealed[:before], bodies, strict=False):
        assert server.incoming.open(one) == body
    right = sealed[before]
    flipped = bytes([right[0] ^ 1]) + right[1:]
    wrong = data.draw(
        st.sampled_from(
            [
                *sealed[:before],
                *sealed[before + 1 :],
                flipped,
                right + b"x",
                right[:SEAL_BYTES] + b"z" + right[SEAL_BYTES:],
                server.outgoing.close(bodies[before]),
                b"",
            ]
        )
    )
    with pytest.raises(ForgedError):
        server.incoming.open(wrong)

"""A host of several addresses is reached by the one that answers, and none that leads nowhere holds it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from phalanx.fleet.control.credentials import connect
from phalanx.hardware.local.network import dial

HOST = "a.host.of.several.addresses"
NOWHERE, ANSWERS = "127.0.0.2", "127.0.0.1"
LONG_S = 3600.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port of ``HOST``, whose first address takes no connection, as one that no route leads to, and whose second one does."""
    with ExitStack() as opened:
        answers = opened.enter_context(socket.create_server((ANSWERS, 0)))
        port = int(answers.getsockname()[1])
        full = opened.enter_context(socket.create_server((NOWHERE, port), backlog=0))
        while True:  # Linux answers nothing once a server's queue is full
            waiting = opened.enter_context(socket.socket())
            waiting.settimeout(1.0)
            try:
                waiting.connect(full.getsockname())
            except TimeoutError:
                break
        addresses = {HOST: (NOWHERE, ANSWERS), "nowhere": (NOWHERE,), "closed": ("127.0.0.3", "127.0.0.4")}

        def getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in addresses.get(host, (host,))
            ]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield port


def test_the_address_that_answers_is_taken_though_one_before_it_does_not(port: int) -> None:
    with dial(HOST, port, LONG_S) as connection:
        assert connection.getpeername() == (ANSWERS, port)
        assert connection.gettimeout() == LONG_S


def test_a_fleets_stream_takes_the_address_that_answers(port: int) -> None:
    async def scene() -> None:
        frames = await connect(f"{HOST}:{port}", None)
        await frames.closed(LONG_S)

    asyncio.run(scene())


def test_a_host_of_which_no_address_answers_is_given_up(port: int) -> None:
    with pytest.raises(TimeoutError):
        dial("nowhere", port, 0.1)


def test_a_host_of_which_all_addresses_refuse_is_refused_at_once(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        dial("closed", port, LONG_S)

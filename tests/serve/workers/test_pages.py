"""Pages between workers over real sockets: what comes is what was offered, and whatever fails leaves the rest to be computed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.workers import page_server
from phalanx.serve.workers.page_client import Pulled, pull
from phalanx.serve.workers.page_server import OfferedPages, PageServer
from phalanx.traffic.events import Identity

IDENTITY = Identity("weights", "numerics", "fp32")
PAGES = {bytes([number]) * 16: os.urandom(10_000) for number in range(4)}
NAMES = tuple(PAGES)


@contextmanager
def serving(pages: OfferedPages) -> Iterator[PageServer]:
    server = PageServer(pages, IDENTITY, "token")
    try:
        yield server
    finally:
        server.close()


def asked(server: PageServer, names: tuple[bytes, ...] = NAMES, **changes: object) -> Pulled:
    given = {"token": "token", "identity": IDENTITY, "job": 7, **changes}
    return pull("127.0.0.1", server.port, names=names, **given)  # type: ignore[arg-type]


def offered(lease_s: float = 60.0) -> OfferedPages:
    pages = OfferedPages(lease_s)
    pages.offer(7, PAGES)
    return pages


def test_pages_come_as_they_were_offered_and_are_freed_then() -> None:
    pages = offered()
    with serving(pages) as server:
        assert asked(server) == Pulled({name: bytearray(page) for name, page in PAGES.items()})
        while pages.count():  # the last word is not answered; the suite's timeout is the limit
            time.sleep(0.01)


def test_a_damaged_page_and_all_behind_it_are_left_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_server.digest
    with monkeypatch.context() as patch:
        patch.setattr(
            page_server, "digest", lambda page: real(page)[::-1] if page == PAGES[NAMES[2]] else real(page)
        )
        pages = offered()
    with serving(pages) as server:
        got = asked(server)
    assert tuple(got.pages) == NAMES[:2]
    assert "damaged" in got.failure


def test_a_lease_that_is_over_offers_nothing_and_holds_nothing() -> None:
    pages = offered(lease_s=0.0)
    with serving(pages) as server:
        got = asked(server)
    assert (got.pages, pages.count()) == ({}, 0)
    assert "lease" in got.failure


def test_pages_of_other_weights_are_refused_before_the_first_byte() -> None:
    with serving(offered()) as server:
        got = asked(server, identity=Identity("others", "numerics", "fp32"))
    assert got.pages == {}
    assert "others" in got.failure


def test_whoever_does_not_know_the_token_gets_nothing_and_others_are_served_on() -> None:
    pages = offered()
    with serving(pages) as server:
        got = asked(server, token="guessed")
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            assert asked(server).failure == ""
    assert got.pages == {}
    assert "token" in got.failure


def test_a_port_where_nobody_listens_is_a_failure_and_no_error() -> None:
    with serving(offered()) as server:
        port = server.port
    assert pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES).failure


def test_pages_behind_a_gap_are_not_offered() -> None:
    with serving(offered()) as server:
        got = asked(server, names=(NAMES[0], b"?" * 16, NAMES[1]))
    assert tuple(got.pages) == NAMES[:1]
    assert "not offered" in got.failure


@contextmanager
def altering(port: int, place: int, value: int) -> Iterator[int]:
    """A port before another one, through which all passes, but for one byte of what the server says."""

    def carry(come: socket.socket, go: socket.socket, *, alter: bool) -> None:
        passed = 0
        with suppress(OSError):
            while body := bytearray(come.recv(1 << 16)):
                if alter and passed <= place < passed + len(body):
                    body[place - passed] ^= value
                passed += len(body)
                go.sendall(body)
        for one in (come, go):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                back = threading.Thread(target=carry, args=(far, near), kwargs={"alter": True})
                back.start()
                carry(near, far, alter=False)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join()


SAID = 40 + 32 + 4
"""Bytes of the server's hello, of its proof, and of the length of its offer."""


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.integers(0, SAID + 300), st.integers(0, SAID + 40_000)), st.integers(1, 255))
def test_whatever_is_altered_on_the_way_no_page_comes_changed(place: int, value: int) -> None:
    with serving(offered()) as server, altering(server.port, place, value) as port:
        got = pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES, within_s=1.0)
    assert tuple(got.pages) == NAMES[: len(got.pages)]
    assert all(page == PAGES[name] for name, page in got.pages.items())
    assert got.failure

"""Pages between workers, through shared memory and over real sockets: pages arrive as they were offered, and those that do not are left to be computed."""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.wire import port
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers import page_transfer
from phalanx_serve.workers.page_transfer import UNLEASED, OfferedPages, PageServer, Pulled, Way, pull
from phalanx_serve.workers.page_wire import SharedMemoryPlace, SharedPages, opened
from serve.workers.services import until

IDENTITY = WorkerIdentity("weights", "numerics", "fp32")
PAGES = {bytes([number]) * 16: os.urandom(10_000) for number in range(4)}
NAMES = tuple(PAGES)

WAYS: tuple[Way, ...] = ("memory", "socket")
each_way = pytest.mark.parametrize("way", WAYS)


@contextmanager
def serving(pages: OfferedPages) -> Iterator[PageServer]:
    server = PageServer(pages, IDENTITY, "token")
    try:
        yield server
    finally:
        server.close()


def pulled(
    server: PageServer, only: Way | None = None, names: tuple[bytes, ...] = NAMES, **changes: object
) -> Pulled:
    options = {"token": "token", "identity": IDENTITY, "job": 7, **changes}
    return pull("127.0.0.1", server.port, names=names, only=only, **options)  # type: ignore[arg-type]


def offered(lease_s: float = 60.0) -> OfferedPages:
    pages = OfferedPages(lease_s)
    pages.offer(7, PAGES)
    return pages


@each_way
def test_pages_come_as_they_were_offered_and_are_freed_then(way: Way) -> None:
    pages = offered()
    with serving(pages) as server:
        assert pulled(server, way) == Pulled(dict(PAGES), way=way)  # type: ignore[arg-type]
        while pages.count():  # the last word is not answered; the suite's timeout is the limit
            time.sleep(0.01)


@each_way
@pytest.mark.parametrize("names", [NAMES[1:], NAMES[2:3], (NAMES[3], NAMES[1])])
def test_only_the_requested_pages_of_a_job_arrive(way: Way, names: tuple[bytes, ...]) -> None:
    with serving(offered()) as server:
        got = pulled(server, way, names)
    assert {name: bytes(page) for name, page in got.pages.items()} == {name: PAGES[name] for name in names}
    assert tuple(got.pages) == names


@each_way
def test_pages_under_no_lease_come_too(way: Way) -> None:
    pages = OfferedPages(look_up=lambda names: {name: PAGES[name] for name in names})
    with serving(pages) as server:
        assert pulled(server, way, job=UNLEASED) == Pulled(dict(PAGES), way=way)  # type: ignore[arg-type]


@each_way
def test_a_damaged_page_and_all_behind_it_are_left_to_be_computed(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "fast_digest" if way == "memory" else "digest"
    real, wrong = getattr(page_transfer, name), iter([True])

    def source_is_wrong(page: bytes | memoryview) -> bytes:
        """Return a wrong digest once: the source hashes a page before its reader does."""
        return real(page)[::-1] if page == PAGES[NAMES[2]] and next(wrong, False) else real(page)

    monkeypatch.setattr(page_transfer, name, source_is_wrong)
    with serving(offered()) as server:
        got = pulled(server, way)
    assert tuple(got.pages) == NAMES[:2]
    assert "damaged" in got.failure


@each_way
def test_a_lease_that_is_over_offers_nothing_and_holds_nothing(way: Way) -> None:
    pages = offered(lease_s=0.0)
    with serving(pages) as server:
        got = pulled(server, way)
    assert (got.pages, pages.count()) == ({}, 0)
    assert "lease" in got.failure


@each_way
def test_pages_that_were_forgotten_with_their_epoch_are_not_offered(way: Way) -> None:
    pages = offered()
    pages.forget()
    with serving(pages) as server:
        got = pulled(server, way)
    assert (got.pages, pages.count()) == ({}, 0)


@each_way
def test_a_lease_that_ends_while_pages_are_read_leaves_them_to_the_reader(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = offered()

    def late(place: SharedMemoryPlace, nbytes: int) -> memoryview:
        pages.forget()  # between the offer and the first look at it
        gc.collect()
        return opened(place, nbytes)

    monkeypatch.setattr(page_transfer, "opened", late)
    with serving(pages) as server:
        got = pulled(server, way)
    pages.forget()
    gc.collect()
    assert {name: bytes(page) for name, page in got.pages.items()} == PAGES


@each_way
def test_pages_of_other_weights_are_refused_before_the_first_byte(way: Way) -> None:
    with serving(offered()) as server:
        got = pulled(server, way, identity=WorkerIdentity("others", "numerics", "fp32"))
    assert got.pages == {}
    assert "others" in got.failure


@each_way
def test_a_peer_without_the_token_gets_nothing_and_others_are_served(way: Way) -> None:
    pages = offered()
    with serving(pages) as server:
        got = pulled(server, way, token="guessed")
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            assert pulled(server, way).failure == ""
    assert got.pages == {}
    assert "token" in got.failure


def test_strangers_write_no_warnings_however_often_they_come(caplog: pytest.LogCaptureFixture) -> None:
    with serving(offered()) as server, caplog.at_level(logging.DEBUG):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger, suppress(OSError):
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                while stranger.recv(1 << 16):
                    pass
        assert not pulled(server, token="another").pages
        # The server logs after it has closed a connection.
        of_the_server = until(
            lambda: (
                (records := [entry for entry in caplog.records if entry.name == port.__name__])[3:]
                and records
            )
        )
    assert all(record.levelno < logging.WARNING for record in of_the_server)


def test_a_port_where_nobody_listens_is_a_failure_and_no_error() -> None:
    with socket.socket() as bound:  # without listening; so no other process gets the port
        bound.bind(("127.0.0.1", 0))
        assert pull("127.0.0.1", bound.getsockname()[1], "token", IDENTITY, 7, NAMES).failure


@each_way
def test_pages_behind_a_gap_are_not_offered(way: Way) -> None:
    with serving(offered()) as server:
        got = pulled(server, way, (NAMES[0], b"?" * 16, NAMES[1]))
    assert tuple(got.pages) == NAMES[:1]
    assert "not offered" in got.failure


@each_way
def test_pages_of_another_size_are_not_taken(way: Way) -> None:
    with serving(offered()) as server:
        got = pulled(server, way, page_bytes=9_999)
    assert got.pages == {}
    assert "10,000 bytes, where 9999 are one" in got.failure


def test_memory_is_the_way_where_it_can_be_and_a_socket_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(offered()) as server:
        assert (pulled(server).way, pulled(server).unreached) == ("memory", "")
    elsewhere = offered()
    with serving(elsewhere) as server:
        # As in another container, where a number is that of another process.
        monkeypatch.setattr(page_transfer, "opened", lambda place, n: opened(_of_parent(place), n))
        got = pulled(server)
        assert got.unreached
        monkeypatch.setattr(page_transfer, "this_machine", lambda: "another")
        assert pulled(server).unreached == ""  # no failure: there is no shared memory between machines
    assert (got.pages, got.way, got.failure) == (PAGES, "socket", "")


def _of_parent(place: SharedMemoryPlace) -> SharedMemoryPlace:
    return SharedMemoryPlace(place.machine, os.getppid(), place.descriptor, place.device, place.inode)


def test_without_shared_memory_pages_go_through_sockets_and_one_warning_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = OfferedPages()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, before[1]))  # no room for two pages in any new file
    try:
        with caplog.at_level(logging.WARNING):
            pages.offer(7, PAGES)
            pages.offer(8, PAGES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("no memory to share could be had") == 1
    with serving(pages) as server:
        assert pulled(server) == Pulled(dict(PAGES), way="socket")  # type: ignore[arg-type]
        assert pulled(server, job=8).pages == PAGES


def test_pages_in_memory_can_be_neither_changed_nor_shortened_and_others_are_not_taken() -> None:
    shared = SharedPages(PAGES.values())
    with pytest.raises(PermissionError):
        os.pwrite(shared.place.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.place.descriptor, 0)
    assert bytes(opened(shared.place, shared.nbytes)) == b"".join(PAGES.values())
    with pytest.raises(OSError, match="fewer than it has announced"):
        opened(shared.place, shared.nbytes + 1)
    descriptor = os.memfd_create("loose")
    try:
        os.write(descriptor, bytes(100))
        status = os.fstat(descriptor)
        loose = SharedMemoryPlace(shared.place.machine, os.getpid(), descriptor, status.st_dev, status.st_ino)
        with pytest.raises(PermissionError, match="can still be changed"):
            opened(loose, 100)
    finally:
        os.close(descriptor)


def test_descriptors_are_given_back_with_the_pages() -> None:
    def open_page_files() -> int:
        return sum(1 for descriptor in os.listdir("/proc/self/fd") if _is_page_file(descriptor))

    before, pages = open_page_files(), offered()
    with serving(pages) as server:
        got = pulled(server, "memory")
        while pages.count():
            time.sleep(0.01)
    assert got.pages == PAGES
    del got
    gc.collect()
    # A connection's thread ends after its conversation, also those of earlier tests.
    until(lambda: open_page_files() <= before)


def _is_page_file(descriptor: str) -> bool:
    with suppress(OSError):
        return "phalanx-pages" in os.readlink(f"/proc/self/fd/{descriptor}")
    return False


SOURCE = """
import sys
from phalanx_serve.workers.page_transfer import OfferedPages, PageServer
from phalanx_serve.traffic.events import WorkerIdentity
pages = OfferedPages()
pages.offer(7, {bytes([number]) * 16: bytes([number]) * 10_000 for number in range(4)})
print(PageServer(pages, WorkerIdentity("weights", "numerics", "fp32"), "token").port, flush=True)
sys.stdin.read()
"""


def test_a_source_that_is_killed_takes_nothing_from_its_readers_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[SharedMemoryPlace] = []
    command = [sys.executable, "-c", SOURCE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:

        def opened_last(place: SharedMemoryPlace, nbytes: int) -> memoryview:
            places.append(place)
            memory = opened(place, nbytes)
            source.kill()
            source.wait()
            return memory

        monkeypatch.setattr(page_transfer, "opened", opened_last)
        assert source.stdout is not None
        port = int(source.stdout.readline())
        got = pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES, only="memory")
    assert [bytes(page) for page in got.pages.values()] == [bytes([n]) * 10_000 for n in range(4)]
    assert got.failure == ""
    with pytest.raises(FileNotFoundError):
        opened(places[0], 1)
    assert pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES).failure


@contextmanager
def altering(port: int, place: int, value: int) -> Iterator[int]:
    """A proxy port before another one that alters one byte that the server sends."""

    def carry(come: socket.socket, go: socket.socket, *, alter: bool) -> None:
        passed = 0
        with suppress(OSError):
            while body := bytearray(come.recv(1 << 16)):
                if alter and passed <= place < passed + len(body):
                    body[place - passed] ^= value
                passed += len(body)
                go.sendall(body)
        for connection in (come, go):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

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


PREAMBLE = 40 + 32 + 4
"""Bytes of the server's hello, of its proof, and of the length of its offer."""


@each_way
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_no_page_arrives_changed_if_any_byte_is_altered_on_the_way(way: Way, data: st.DataObject) -> None:
    most = (
        PREAMBLE + 250 if way == "memory" else PREAMBLE + 40_000
    )  # no byte of a page is on its way in memory
    place = data.draw(st.one_of(st.integers(0, PREAMBLE + 250), st.integers(0, most)))
    with serving(offered()) as server, altering(server.port, place, data.draw(st.integers(1, 255))) as port:
        got = pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES, within_s=1.0, only=way)
    assert tuple(got.pages) == NAMES[: len(got.pages)]
    assert all(page == PAGES[name] for name, page in got.pages.items())
    assert got.failure

"""Rates of a process's connections, by the kernel's counters."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.parallel.process_group.sockets import LinkMeter, duplicate_connection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
MANY = bytes(8 << 20)


@contextmanager
def connected(server_host: str) -> Iterator[socket.socket]:
    """A connection from 127.0.0.1 to a server that reads all that it gets."""
    with socket.create_server((server_host, 0)) as server:
        client = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        accepted, _ = server.accept()

        def drain() -> None:
            while accepted.recv(1 << 16):
                pass

        reader = threading.Thread(target=drain)
        reader.start()
        with accepted, client:
            yield client
            client.shutdown(socket.SHUT_WR)
            reader.join()


def test_the_rate_is_that_of_a_connection_to_another_address_that_sends_much() -> None:
    with connected("127.0.0.2") as client:
        meter = LinkMeter()
        figures: dict[str, float] = {}
        while not figures:  # the kernel counts the time in ticks: fast transfers may take none
            client.sendall(MANY)
            figures = meter.read()
        assert figures["link_bytes_per_s"] > 0


def test_a_connection_within_the_machine_or_with_few_bytes_has_none() -> None:
    with connected("127.0.0.1") as within, connected("127.0.0.2") as quiet:
        meter = LinkMeter()
        for _ in range(20):
            within.sendall(MANY)
            quiet.sendall(b"a few bytes")
        assert meter.read() == {}


def test_a_connection_that_is_new_since_the_last_reading_has_no_rate_yet() -> None:
    meter = LinkMeter()
    with connected("127.0.0.2") as client:
        for _ in range(20):
            client.sendall(MANY)
        assert meter.read() == {}


def test_a_number_that_belongs_to_a_file_by_now_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert duplicate_connection(file.fileno(), os.fstat(file.fileno()).st_ino) is None
        opened = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(file.name)]
        assert [fd.name for fd in opened] == [str(file.fileno())]

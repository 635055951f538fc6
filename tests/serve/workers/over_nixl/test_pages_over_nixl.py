"""Pages that are read over NIXL by real agents, each in its process: what comes is what was offered, and whatever happens to an agent, what is left comes another way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from phalanx_process import alive
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers.nixl_agent import NixlAgent
from phalanx_serve.workers.nixl_client import AgentProcess, Laying, StagingRange
from phalanx_serve.workers.page_transfer import OfferedPages, PageServer, Pulled, pull
from phalanx_serve.workers.page_wire import Laid
from serve.workers.services import until

pytestmark = pytest.mark.skipif(
    find_spec("nixl") is None, reason="NIXL is not installed: pip install --no-deps -r requirements/nixl.txt"
)

IDENTITY = WorkerIdentity("weights", "numerics", "fp32")
PAGE_BYTES = 3 << 20
PAGES = {bytes([number]) * 16: os.urandom(PAGE_BYTES) for number in range(7)}
"""Two are read at a time."""
NAMES = tuple(PAGES)
STAGING_BYTES = 64 << 20


@contextmanager
def running() -> Iterator[AgentProcess]:
    process = AgentProcess(STAGING_BYTES)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[AgentProcess, AgentProcess]]:
    with running() as source, running() as reader:
        yield source, reader


@pytest.fixture
def source(agents: tuple[AgentProcess, AgentProcess]) -> AgentProcess:
    until(lambda: all(map(_there, agents)))
    return agents[0]


@pytest.fixture
def reader(agents: tuple[AgentProcess, AgentProcess]) -> AgentProcess:
    return agents[1]


def _there(process: AgentProcess) -> bool:
    return process._agent is not None


@contextmanager
def serving(nixl: AgentProcess | None, pages: dict[bytes, bytes] = PAGES) -> Iterator[PageServer]:
    offered = OfferedPages(60.0, share=False)
    offered.offer(7, pages)
    server = PageServer(offered, IDENTITY, "token", nixl=nixl)
    try:
        yield server
        until(lambda: offered.count() == 0)  # the last word is not answered
    finally:
        server.close()


def pulled(server: PageServer, reader: AgentProcess, names: Sequence[bytes] = NAMES) -> Pulled:
    return pull("127.0.0.1", server.port, "token", IDENTITY, 7, names, within_s=60.0, nixl=reader)


def after_first_read(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Call ``happens`` between two runs of pages."""
    read, runs = AgentProcess.read, []

    def watched(self: AgentProcess, *args: object) -> None:
        read(self, *args)  # type: ignore[arg-type]
        runs.append(1)
        if len(runs) == 1:
            happens()

    monkeypatch.setattr(AgentProcess, "read", watched)


@pytest.mark.parametrize("names", [NAMES, NAMES[1:2], NAMES[5:]])
def test_pages_come_over_nixl_as_they_were_offered(
    source: AgentProcess, reader: AgentProcess, names: tuple[bytes, ...]
) -> None:
    with serving(source) as server:
        got = pulled(server, reader, names)
    assert got == Pulled({name: bytearray(PAGES[name]) for name in names}, "", "nixl", "", len(names))
    assert tuple(got.pages) == names


def test_small_pages_come_in_one_run_and_nothing_of_the_staging_stays_taken(
    source: AgentProcess, reader: AgentProcess
) -> None:
    small = {name: page[:10_000] for name, page in PAGES.items()}
    with serving(source, small) as server:
        assert pulled(server, reader).pages == small
    until(lambda: source.staging.take(STAGING_BYTES))
    source.staging.give_back(StagingRange(0, STAGING_BYTES))
    with reader.staging.stretches(1, STAGING_BYTES):
        pass
    until(lambda: source._readers == 0)


@pytest.mark.parametrize("damaged", [0, 3, 6])
def test_a_page_whose_bytes_were_damaged_and_all_behind_it_are_left_to_be_computed(
    source: AgentProcess, reader: AgentProcess, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    lay, laid = Laying.lay, []

    def spoiling(self: Laying, pages: Sequence[tuple[bytes, bytes]]) -> object:
        layout = lay(self, pages)
        assert isinstance(layout, Laid)
        place = damaged - len(laid)
        laid.extend(pages)
        if 0 <= place < len(pages):
            start = layout.address - layout.agent.address + place * PAGE_BYTES
            source.staging.view(StagingRange(start, PAGE_BYTES))[PAGE_BYTES // 2] ^= 1
        return layout

    monkeypatch.setattr(Laying, "lay", spoiling)
    offered = OfferedPages(60.0, share=False)
    offered.offer(7, PAGES)
    server = PageServer(offered, IDENTITY, "token", nixl=source)
    try:
        got = pulled(server, reader)
    finally:
        server.close()
    assert got.pages == {name: PAGES[name] for name in NAMES[:damaged]}
    assert "came damaged" in got.failure


def test_pages_of_a_worker_whose_agent_is_killed_come_through_the_socket_and_later_over_nixl_again(
    source: AgentProcess, reader: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = source.agent()
    with monkeypatch.context() as patch:
        after_first_read(patch, lambda: _kill(source))
        with serving(source) as server:
            got = pulled(server, reader)
    assert (got.pages, got.failure, got.way) == (PAGES, "", "socket")
    assert 2 <= got.over_nixl < len(PAGES)
    assert got.unreached
    until(lambda: _there(source))
    assert source.agent().name != first.name
    with serving(source) as server:
        assert pulled(server, reader).way == "nixl"


def _kill(process: AgentProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not _there(process))


def test_pages_come_through_the_socket_when_the_readers_own_agent_is_killed(
    source: AgentProcess, reader: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_first_read(monkeypatch, lambda: _kill(reader))
    with serving(source) as server:
        got = pulled(server, reader)
    assert (got.pages, got.failure, got.way, got.over_nixl) == (PAGES, "", "socket", 2)
    assert "its process was killed by SIGKILL" in got.unreached


def test_an_agent_that_stands_still_is_ended_and_pages_come_through_the_socket(
    source: AgentProcess, reader: AgentProcess
) -> None:
    pid = reader.pid
    os.kill(pid, signal.SIGSTOP)
    with serving(source) as server:
        got = pulled(server, reader)
    assert (got.pages, got.failure, got.way, got.over_nixl) == (PAGES, "", "socket", 0)
    assert "does not answer" in got.unreached
    until(lambda: _there(reader) and reader.pid != pid)


def test_a_worker_without_an_agent_and_one_without_room_send_pages_through_the_socket(
    source: AgentProcess, reader: AgentProcess
) -> None:
    with serving(None) as server:
        got = pulled(server, reader)
    assert (got.pages, got.way) == (PAGES, "socket")
    assert "offers nothing over NIXL" in got.unreached
    for full in (source, reader):
        with full.staging.stretches(1, STAGING_BYTES), serving(source) as server:
            got = pulled(server, reader)
        assert (got.pages, got.failure, got.way) == (PAGES, "", "socket")
        assert "are not free" in got.unreached


def test_memory_that_an_agent_cannot_read_is_an_error_and_the_next_read_succeeds(
    source: AgentProcess, reader: AgentProcess
) -> None:
    there = source.agent()
    for wrong in (NixlAgent("another", there.metadata, there.address), NixlAgent("none", b"nothing", 0)):
        with reader.staging.stretches(1, 4096) as (into,), pytest.raises(Exception, match="did not bring"):
            reader.read(wrong, there.address, into, 1, 4096, 5.0)
    outside = there.address + STAGING_BYTES
    with reader.staging.stretches(1, 4096) as (into,), pytest.raises(Exception, match="did not bring"):
        reader.read(there, outside, into, 1, 4096, 5.0)
    with serving(source) as server:
        assert pulled(server, reader).way == "nixl"


SOURCE = """
import os, sys
from phalanx_serve.workers.nixl_client import AgentProcess
from phalanx_serve.workers.page_transfer import OfferedPages, PageServer
from phalanx_serve.traffic.events import WorkerIdentity
pages, nixl = OfferedPages(share=False), AgentProcess(64 << 20)
pages.offer(7, {bytes([number]) * 16: bytes([number]) * (3 << 20) for number in range(7)})
server = PageServer(pages, WorkerIdentity("weights", "numerics", "fp32"), "token", nixl=nixl)
print(server.port, nixl.pid, flush=True)
sys.stdin.read()
"""


def test_a_source_that_is_killed_in_the_middle_leaves_whole_pages_and_no_process(
    source: AgentProcess, reader: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    del source
    command = [sys.executable, "-c", SOURCE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port, agent = map(int, other.stdout.readline().split())

        def die() -> None:
            other.kill()
            other.wait()

        after_first_read(monkeypatch, die)
        # It ends by the source's end: its time is longer than the suite's timeout.
        got = pull("127.0.0.1", port, "token", IDENTITY, 7, NAMES, within_s=3600.0, nixl=reader)
    assert got.failure
    assert 1 <= len(got.pages) < len(NAMES)
    assert list(got.pages.values()) == [bytes([number]) * PAGE_BYTES for number in range(len(got.pages))]
    until(lambda: not alive(agent))

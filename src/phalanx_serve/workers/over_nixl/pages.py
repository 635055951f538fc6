"""Pages over NIXL, a run of them at a time: laid by the worker that offers them, and read out of its memory by another.

Two stretches of the staging take turns: while one is read the next pages are laid in the other. They are taken back when the reader's conversation ends, so
that a reader that dies holds nothing.

The sealed conversation goes on meanwhile: its source is asked to lay the next pages, tells where they lie, and the SHA-256 of each, exactly as before pages that come
through the socket. While one run is read, the one before is copied out of the staging and hashed, and the next one is laid.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.wire.connection import SealedConnection
from phalanx.wire.messages import WireError
from phalanx_serve.workers.over_nixl.agent_process import AgentProcess, NixlError, Stretch
from phalanx_serve.workers.page_wire import MESSAGES, Laid, Lay, NotLaid, Offer, digest

# The source.


class Laying:
    """See the module; of one conversation."""

    def __init__(self, process: AgentProcess | None) -> None:
        self._process = process
        self._turns: list[Stretch] = []

    def lay(self, pages: Sequence[tuple[bytes | memoryview, bytes]]) -> Laid | NotLaid:
        """Lays pages, each with its digest, where those before the last ones lay."""
        if self._process is None:
            return NotLaid("it offers nothing over NIXL")
        try:
            agent = self._process.agent()
            stretch = self._turn(sum(len(page) for page, _ in pages))
        except NixlError as error:
            return NotLaid(str(error))
        view = self._process.staging.view(stretch)
        start = 0
        for page, _ in pages:
            view[start : start + len(page)] = page
            start += len(page)
        return Laid(agent, agent.address + stretch.start, tuple(digest for _, digest in pages))

    def close(self) -> None:
        """Takes the stretches back."""
        if self._turns and self._process is not None:
            self._process.serve(-1)
            for one in self._turns:
                self._process.staging.give_back(one)
            self._turns.clear()

    def _turn(self, nbytes: int) -> Stretch:
        """The stretch that is not being read now, large enough."""
        assert self._process is not None
        if len(self._turns) == 2 and self._turns[0].nbytes >= nbytes:
            self._turns.reverse()
            return self._turns[1]
        if len(self._turns) == 2:
            self._process.staging.give_back(self._turns.pop(0))
        taken = self._process.staging.take(nbytes)
        if not self._turns:
            self._process.serve(1)
        self._turns.append(taken)
        return taken


# The reader.


_RUN_BYTES = 8 << 20
"""The bytes that are read at a time, but one page at least."""
_RUN_S = 2.0
"""What a run may take: a tenth of a second is what it does take, by the slowest rate seen."""


@dataclass(frozen=True)
class Came:
    """A page that was read, in memory of its own, and the digest that it must have."""

    page: bytearray
    right: bytes
    found: bytes


def read_pages(
    wire: SealedConnection, process: AgentProcess, offer: Offer, until_s: float
) -> Generator[Came]:
    """The pages of an offer, in their order. Raises NixlError where those that are left must come another way, and WireError where none will."""
    most = max(1, _RUN_BYTES // offer.page_bytes)
    runs = [range(first, min(first + most, len(offer.names))) for first in range(0, len(offer.names), most)]
    with (
        process.staging.stretches(2, len(runs[0]) * offer.page_bytes) as turns,
        ThreadPoolExecutor(1) as hashing,
    ):
        unhashed: deque[Future[list[Came]]] = deque()
        trouble: NixlError | WireError | None = None
        try:
            for number, digests in enumerate(
                _read_runs(wire, process, offer.page_bytes, runs, turns, until_s)
            ):
                memory = process.staging.view(turns[number % 2])
                unhashed.append(hashing.submit(_copied, memory, offer.page_bytes, digests))
                if len(unhashed) > 1:  # so that the turn after this one is free
                    yield from unhashed.popleft().result()
        except (NixlError, WireError) as error:
            trouble = error
        while unhashed:  # what came before the trouble is whole
            yield from unhashed.popleft().result()
        if trouble is not None:
            raise trouble


def _read_runs(
    wire: SealedConnection,
    process: AgentProcess,
    page_bytes: int,
    runs: Sequence[range],
    turns: Sequence[Stretch],
    until_s: float,
) -> Iterator[tuple[bytes, ...]]:
    """Reads each run into its turn, and yields its digests."""
    wire.send_message(Lay(runs[0].start, len(runs[0])))
    for number, run in enumerate(runs):
        laid = _heard(wire, len(run))
        if isinstance(laid, NotLaid):
            raise NixlError(f"{wire.peer}: {laid.why}")
        after = runs[number + 1] if number + 1 < len(runs) else None
        if after is not None:
            wire.send_message(Lay(after.start, len(after)))
        within_s = min(_RUN_S, until_s - time.monotonic())
        try:
            process.read(laid.agent, laid.address, turns[number % 2], len(run), page_bytes, within_s)
        except NixlError:
            if after is not None:
                _heard(wire, len(after))  # what it has begun to lay is not to be read
            raise
        yield laid.digests


def _heard(wire: SealedConnection, pages: int) -> Laid | NotLaid:
    laid = wire.receive_message(MESSAGES)
    if isinstance(laid, NotLaid) or (isinstance(laid, Laid) and len(laid.digests) == pages):
        return laid
    raise WireError(f"{wire.peer}: lays other pages than were asked for")


def _copied(memory: memoryview, page_bytes: int, digests: Sequence[bytes]) -> list[Came]:
    """Pages out of the staging. The copy is hashed, not what was copied: that can still be written to by a reading that came too late."""
    came = []
    for number, right in enumerate(digests):
        page = bytearray(memory[number * page_bytes : (number + 1) * page_bytes])
        came.append(Came(page, right, digest(page)))
    return came

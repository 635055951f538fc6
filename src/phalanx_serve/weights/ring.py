"""Weights read into a few buffers ahead of the computation: layers by a ring, in their order, pass after pass; experts by a cache.

With ``k`` buffers, reading layer *l* starts when layer *l - 1* has been read and layer *l - k* computed, whose buffer it takes; computing it
starts when it has been read and layer *l - 1* computed. The reader runs on into the next pass. For equal layers a pass takes the larger of
all reading and all computing. A layer that is resident is not read and takes no buffer.

Experts are read when the router has chosen them, kept by how often it does, and prefetched where it probably will choose them.
Threads read what is needed soonest first: an expert that a layer waits for goes before the next layers' weights.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import partial

from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.pack.layout import CHUNK_BYTES, padded_bytes
from phalanx.checkpoint.pack.reader import PackFile

# Reading threads.


Urgency = tuple[int, int]
"""Priority, smaller first: the layer's number, counted through all passes, and the kind of read."""


class ReadPool:
    """Thread pool with a priority queue. Reads of equal urgency run in the order of submission."""

    def __init__(self, threads: int) -> None:
        """Start the threads that read."""
        self._queue: list[tuple[Urgency, int, Callable[[], None], Future[None]]] = []
        self._submitted = 0
        self._closed = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"weights-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, read: Callable[[], None]) -> Future[None]:
        """Queue a read; the lowest ``urgency`` is first. The future raises the errors of the read.

        Raises RuntimeError if the pool is closed.
        """
        future: Future[None] = Future()
        with self._change:
            if self._closed:
                raise RuntimeError("the streamed weights are closed: open the model again")
            heapq.heappush(self._queue, (urgency, self._submitted, read, future))
            self._submitted += 1
            self._change.notify()
        return future

    def close(self) -> None:
        """End the threads, and wait for the running reads; waiting reads are canceled, and later ones refused."""
        with self._change:
            self._closed = True
            waiting, self._queue = self._queue, []
            self._change.notify_all()
        for *_, future in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """Read what is most urgent, until the pool is closed. Skip cancelled reads; give each future its read's error."""
        while True:
            with self._change:
                while not self._queue and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                *_, read, future = heapq.heappop(self._queue)
            if not future.set_running_or_notify_cancel():
                continue  # canceled; its buffer may be in use by another read
            try:
                read()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)


# The ring.


READ_CHUNKS = 4
"""Chunks per read: 8 MiB."""
_PATIENCE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass
class StreamStatistics:
    """Counters of streaming since the start."""

    bytes_read: int = 0
    stall_s: dict[int, float] = field(default_factory=dict)
    """Seconds that each layer's forward has waited for its body."""
    expert_stall_s: float = 0.0
    expert_hits: int = 0
    """Requested experts that were in memory, or being read."""
    expert_misses: int = 0
    prefetched: int = 0
    """Experts that were read ahead, by the prediction of the next layer's router."""


def read_ahead(
    pack: PackFile, pool: ReadPool, section: int, buffer: ByteArray, urgency: Urgency
) -> list[Future[None]]:
    """Begin to read a section into ``buffer``, in chunks of ``READ_CHUNKS``. Returns a future of each, which raises its error."""
    entry = pack.index.sections[section]
    futures = []
    for first in range(0, entry.chunks, READ_CHUNKS):
        count = min(READ_CHUNKS, entry.chunks - first)
        low = first * CHUNK_BYTES
        high = padded_bytes(min(low + count * CHUNK_BYTES, entry.nbytes))
        read = partial(pack.read_chunks, section, first, count, buffer[low:high])
        futures.append(pool.submit(urgency, read))
    return futures


def wait(futures: Sequence[Future[None]], name: str) -> float:
    """Wait for the reads of ``name``; return the seconds. Raises the first error, and logs a warning every ``_PATIENCE_S``."""
    began = time.perf_counter()
    for future in futures:
        while True:
            try:
                future.result(_PATIENCE_S)
                break
            except NotYetError:
                if future.done():
                    raise
                _log.warning("%s: still waiting for the disk after %.0f s", name, time.perf_counter() - began)
    return time.perf_counter() - began


class Ring:
    """Ring of buffers for the bodies of streamed layers. One thread takes and releases them in turn."""

    def __init__(
        self,
        pack: PackFile,
        pool: ReadPool,
        sections: Sequence[int],
        buffers: int,
        statistics: StreamStatistics,
    ) -> None:
        """Allocate ``buffers`` buffers of the largest section, and begin to read. ``sections`` are those of a pass, in order."""
        self._pack, self._pool, self._sections, self._statistics = pack, pool, list(sections), statistics
        size = max(padded_bytes(pack.index.sections[number].nbytes) for number in sections)
        self._free = [page_aligned(size) for _ in range(buffers)]
        self._ahead: deque[tuple[int, ByteArray, list[Future[None]]]] = deque()
        self._taken: ByteArray | None = None
        self._next = 0  # the number of the next read, counted through all passes
        self._fill()

    def take(self, section: int) -> ByteArray:
        """Return the bytes of a section, valid until ``release``.

        Raises the errors of reading it. Waits for it, and records the seconds. Another order than that of the pass
        begins the reads again.
        """
        if not self._ahead or self._ahead[0][0] != section:
            self._move_to(section)
        _, buffer, futures = self._ahead.popleft()
        self._taken = buffer
        entry = self._pack.index.sections[section]
        waited = wait(futures, f"{self._pack.path}, {entry.name}")
        self._statistics.stall_s[entry.layer] = self._statistics.stall_s.get(entry.layer, 0.0) + waited
        self._statistics.bytes_read += entry.nbytes
        return buffer[: entry.nbytes]

    def release(self) -> None:
        """Release the last taken buffer, which the reader then reuses. Begins the next read."""
        if self._taken is not None:
            self._free.append(self._taken)
            self._taken = None
            self._fill()

    def _move_to(self, section: int) -> None:
        """Start again at a section, after a pass was aborted or for another order of layers.

        Waits until all reads that were begun ahead have ended, and drops their bytes and errors.
        """
        for _, buffer, futures in self._ahead:
            for future in futures:
                future.exception()
            self._free.append(buffer)
        self._ahead.clear()
        turn = -(-self._next // len(self._sections))
        self._next = turn * len(self._sections) + self._sections.index(section)
        self._fill()

    def _fill(self) -> None:
        """Begin to read the next sections, in cyclic order, into all free buffers."""
        while self._free:
            section = self._sections[self._next % len(self._sections)]
            buffer = self._free.pop()
            layer = self._pack.index.sections[section].layer
            turn = self._next // len(self._sections)
            futures = read_ahead(self._pack, self._pool, section, buffer, (turn << 20 | layer, 1))
            self._ahead.append((section, buffer, futures))
            self._next += 1


# Expert cache: reads the router's choices, evicts by frequency, and prefetches predicted choices.


# Eviction policy: frequency with ageing, shallow layers favored, and the optimum with which it is compared. Pure.
#
# A layer's experts are requested once per pass, so LRU would evict those that are needed next. The value of an expert is its
# frequency in recent passes. Experts of deep layers can be read ahead while earlier layers compute, so those of shallow layers
# are kept a little longer.

ExpertName = tuple[int, int]
"""Layer and expert."""

_AGEING = 0.9  # weight of a use after one more pass
_SHALLOW = 0.1  # additional weight of the first layer's uses, relative to the last layer's


class ExpertFrequency:
    """Recent frequency of each expert."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._uses: dict[ExpertName, tuple[float, int]] = {}

    def use(self, expert: ExpertName, turn: int) -> None:
        """Count a use in pass ``turn``."""
        self._uses[expert] = (self._aged(expert, turn) + 1.0, turn)

    def value(self, expert: ExpertName, turn: int) -> float:
        """Return the value of keeping an expert in memory."""
        return self._aged(expert, turn) * (1.0 + _SHALLOW * (self._layers - expert[0]) / self._layers)

    def least(
        self, cached: Iterable[ExpertName], spared: Collection[ExpertName], turn: int
    ) -> ExpertName | None:
        """Return the expert of least value among ``cached`` without ``spared``, to evict; None if all are spared."""
        return min(
            (expert for expert in cached if expert not in spared),
            key=lambda expert: (self.value(expert, turn), expert),
            default=None,
        )

    def _aged(self, expert: ExpertName, turn: int) -> float:
        """Return an expert's uses, of which older ones count less."""
        uses, last = self._uses.get(expert, (0.0, turn))
        return uses * _AGEING ** (turn - last)


_NOW: Urgency = (-1, 0)


@dataclass
class _CachedExpert:
    slot: int
    reading: list[Future[None]]


class ExpertCache:
    """Cache of at most ``slots`` experts of all layers, for one thread."""

    def __init__(self, pack: PackFile, pool: ReadPool, slots: int, statistics: StreamStatistics) -> None:
        """Allocate memory for ``slots`` experts of the pack's largest size. The pack has experts."""
        sections = pack.index.sections
        self._numbers = {
            (section.layer, section.expert): number
            for number, section in enumerate(sections)
            if section.kind == "expert"
        }
        self._pack, self._pool, self._statistics = pack, pool, statistics
        size = max(padded_bytes(sections[number].nbytes) for number in self._numbers.values())
        memory = page_aligned(slots * size)
        self._memory = [memory[place * size : (place + 1) * size] for place in range(slots)]
        self._free = list(range(slots))
        self._cached: dict[ExpertName, _CachedExpert] = {}
        self._frequency = ExpertFrequency(1 + max(layer for layer, _ in self._numbers))
        self.slots = slots

    def need(self, layer: int, experts: Collection[int], turn: int) -> None:
        """Begin to read a layer's chosen ``experts`` that are not cached, as many as fit beside each other.

        Prefetches that have not begun are queued again as urgent. Counts uses, hits and misses, and evicts other
        experts.
        """
        names = [(layer, expert) for expert in experts]
        for name in names:
            self._frequency.use(name, turn)
            if name in self._cached:
                self._statistics.expert_hits += 1
                # A prefetch that waits goes before all other reads.
                cached = self._cached[name]
                if cached.reading and cached.reading[0].cancel():
                    for future in cached.reading[1:]:
                        if not future.cancel():
                            future.exception()
                    number = self._numbers[name]
                    cached.reading = read_ahead(
                        self._pack, self._pool, number, self._memory[cached.slot], _NOW
                    )
            else:
                self._statistics.expert_misses += 1
        needed = set(names)
        for name in names:
            if name not in self._cached and not self._read(name, needed, turn, _NOW):
                break

    def prefetch(self, layer: int, experts: Iterable[int], spared: Collection[ExpertName], turn: int) -> None:
        """Begin to read experts that a layer will probably choose, at most a quarter of the slots.

        Stops if only ``spared`` experts could be evicted. Counts those that it begins.
        """
        names = [(layer, expert) for expert in experts][: max(1, self.slots // 4)]
        kept = {*spared, *names}
        for name in names:
            if name not in self._cached:
                if not self._read(name, kept, turn, (turn << 20 | layer, 2)):
                    return
                self._statistics.prefetched += 1

    def get(self, expert: ExpertName, still_needed: Collection[ExpertName], turn: int) -> ByteArray:
        """Return the bytes of an expert, valid until the next call.

        Reads it first if it is not cached, also in place of a needed one, and waits; the wait is counted. Raises the
        errors of reading it, and then drops it.
        """
        if expert not in self._cached and not self._read(expert, still_needed, turn, _NOW):
            # This layer still needs all cached experts: evict the one that it needs last, and read it again.
            self._drop(max(other for other in self._cached if other != expert))
            self._read(expert, (), turn, _NOW)
        cached = self._cached[expert]
        try:
            self._statistics.expert_stall_s += wait(cached.reading, f"{self._pack.path}, expert {expert}")
        except BaseException:
            self._drop(expert)
            raise
        cached.reading = []
        return self._memory[cached.slot][: self._pack.index.sections[self._numbers[expert]].nbytes]

    def _read(self, expert: ExpertName, spared: Collection[ExpertName], turn: int, urgency: Urgency) -> bool:
        """Begin to read an expert into a free slot, or that of the least used other than ``spared``; False if all are spared."""
        if not self._free:
            victim = self._frequency.least(self._cached, spared, turn)
            if victim is None:
                return False
            self._drop(victim)
        slot, number = self._free.pop(), self._numbers[expert]
        reading = read_ahead(self._pack, self._pool, number, self._memory[slot], urgency)
        self._cached[expert] = _CachedExpert(slot, reading)
        self._statistics.bytes_read += self._pack.index.sections[number].nbytes
        return True

    def _drop(self, expert: ExpertName) -> None:
        """Remove an expert: cancel its waiting reads, wait for running ones, and free its slot."""
        cached = self._cached.pop(expert)
        for future in cached.reading:
            if not future.cancel():
                future.exception()
        self._free.append(cached.slot)

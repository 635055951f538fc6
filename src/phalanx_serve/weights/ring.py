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

# The closed form of streaming.


@dataclass(frozen=True)
class Timeline:
    """Several passes over all layers."""

    pass_ends: tuple[float, ...]
    """When each pass has been computed, in seconds from the first read."""
    stalls: tuple[float, ...]
    """Seconds that each layer of the last pass waited to be read."""

    @property
    def pass_seconds(self) -> float:
        """Seconds of the last pass: with three passes or more, that of the steady state."""
        before = self.pass_ends[-2] if len(self.pass_ends) > 1 else 0.0
        return self.pass_ends[-1] - before


def timeline(read_s: Sequence[float], compute_s: Sequence[float], buffers: int, passes: int = 4) -> Timeline:
    """The timeline of layers that take ``read_s`` (0: resident) and ``compute_s``. Raises ValueError for numbers out of range."""
    if buffers < 1 or passes < 1 or len(read_s) != len(compute_s):
        raise ValueError("streaming needs a buffer, a pass, and both times of each layer")
    free = [0.0] * buffers  # when each buffer's last layer was computed, in the order in which they are taken
    read_end = compute_end = 0.0
    taken, ends, stalls = 0, [], [0.0] * len(read_s)
    for _ in range(passes):
        for layer, (reading, computing) in enumerate(zip(read_s, compute_s, strict=True)):
            ready = 0.0
            if reading:
                read_end = max(read_end, free[taken % buffers]) + reading
                ready = read_end
            stalls[layer] = max(0.0, ready - compute_end)
            compute_end = max(ready, compute_end) + computing
            if reading:
                free[taken % buffers] = compute_end
                taken += 1
        ends.append(compute_end)
    return Timeline(tuple(ends), tuple(stalls))


# Reading threads.


Urgency = tuple[int, int]
"""The smaller, the sooner: the number of the layer, counted through all passes, and what of it."""


class ReadPool:
    """A pool of threads with a priority queue; reads of equal urgency are done in the order in which they were asked for."""

    def __init__(self, threads: int) -> None:
        self._queue: list[tuple[Urgency, int, Callable[[], None], Future[None]]] = []
        self._asked = 0
        self._closed = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"weights-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, read: Callable[[], None]) -> Future[None]:
        """Queues a read. What it raises, the future raises."""
        future: Future[None] = Future()
        with self._change:
            heapq.heappush(self._queue, (urgency, self._asked, read, future))
            self._asked += 1
            self._change.notify()
        return future

    def close(self) -> None:
        """Ends the threads after the reads under way; reads that still wait are cancelled."""
        with self._change:
            self._closed = True
            waiting, self._queue = self._queue, []
            self._change.notify_all()
        for *_, future in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._queue and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                *_, read, future = heapq.heappop(self._queue)
            if not future.set_running_or_notify_cancel():
                continue  # nobody wants it any more, and its buffer may be another's
            try:
                read()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)


# The ring.


READ_CHUNKS = 4
"""Chunks that one read takes: 8 MiB."""
_PATIENCE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass
class StreamStatistics:
    """What streaming has done since it began."""

    bytes_read: int = 0
    stall_s: dict[int, float] = field(default_factory=dict)
    """Seconds that each layer's forward has waited for its body."""
    expert_stall_s: float = 0.0
    expert_hits: int = 0
    """Experts that were needed and already there or on their way."""
    expert_misses: int = 0
    prefetched: int = 0
    """Experts that were read because the next layer's router chose them beforehand."""


def read_ahead(
    pack: PackFile, pool: ReadPool, section: int, buffer: ByteArray, urgency: Urgency
) -> list[Future[None]]:
    """Begins to read a section into ``buffer``, in pieces."""
    one = pack.index.sections[section]
    futures = []
    for first in range(0, one.chunks, READ_CHUNKS):
        count = min(READ_CHUNKS, one.chunks - first)
        low = first * CHUNK_BYTES
        high = padded_bytes(min(low + count * CHUNK_BYTES, one.nbytes))
        read = partial(pack.read_chunks, section, first, count, buffer[low:high])
        futures.append(pool.submit(urgency, read))
    return futures


def wait(futures: Sequence[Future[None]], what: str) -> float:
    """Waits for a section; returns the seconds. Raises what reading raised; says aloud when it takes long."""
    began = time.perf_counter()
    for future in futures:
        while True:
            try:
                future.result(_PATIENCE_S)
                break
            except NotYetError:
                if future.done():
                    raise
                _log.warning("%s: still waiting for the disk after %.0f s", what, time.perf_counter() - began)
    return time.perf_counter() - began


class Ring:
    """Buffers for the bodies of streamed layers; one thread takes them in turn and gives each back."""

    def __init__(
        self,
        pack: PackFile,
        pool: ReadPool,
        sections: Sequence[int],
        buffers: int,
        statistics: StreamStatistics,
    ) -> None:
        """``sections`` are those of a pass, in their order."""
        self._pack, self._pool, self._sections, self._statistics = pack, pool, list(sections), statistics
        size = max(padded_bytes(pack.index.sections[number].nbytes) for number in sections)
        self._free = [page_aligned(size) for _ in range(buffers)]
        self._ahead: deque[tuple[int, ByteArray, list[Future[None]]]] = deque()
        self._held: ByteArray | None = None
        self._next = 0  # the number of the next read, counted through all passes
        self._fill()

    def take(self, section: int) -> ByteArray:
        """The bytes of a section, valid until ``release``. Raises what reading it raised."""
        if not self._ahead or self._ahead[0][0] != section:
            self._move_to(section)
        _, buffer, futures = self._ahead.popleft()
        self._held = buffer
        one = self._pack.index.sections[section]
        waited = wait(futures, f"{self._pack.path}, {one.name}")
        self._statistics.stall_s[one.layer] = self._statistics.stall_s.get(one.layer, 0.0) + waited
        self._statistics.bytes_read += one.nbytes
        return buffer[: one.nbytes]

    def release(self) -> None:
        """Gives back what was taken last; its buffer is read into again."""
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
            self._fill()

    def _move_to(self, section: int) -> None:
        """Begins anew at a section: a pass was broken off, or another order of layers is computed."""
        for _, buffer, futures in self._ahead:
            for future in futures:
                future.exception()
            self._free.append(buffer)
        self._ahead.clear()
        turn = -(-self._next // len(self._sections))
        self._next = turn * len(self._sections) + self._sections.index(section)
        self._fill()

    def _fill(self) -> None:
        while self._free:
            section = self._sections[self._next % len(self._sections)]
            buffer = self._free.pop()
            layer = self._pack.index.sections[section].layer
            turn = self._next // len(self._sections)
            futures = read_ahead(self._pack, self._pool, section, buffer, (turn << 20 | layer, 1))
            self._ahead.append((section, buffer, futures))
            self._next += 1


# Experts in memory: read when the router has chosen them, kept by how often it does, prefetched where it probably will.


# Which expert gives way: frequency with ageing, shallow layers favoured; and the optimum that it is measured against. Pure.
#
# A layer's experts are asked for once in a pass, so what was used last is needed again last, and least recent use would be the worst of
# choices. What counts is how often an expert was chosen in recent passes. Experts of deep layers can be read ahead while the layers before
# them are computed, so those of shallow layers are kept a little longer.

ExpertName = tuple[int, int]
"""Layer and expert."""

_AGEING = 0.9  # what a use counts after one more pass
_SHALLOW = 0.1  # how much more the first layer's uses count than the last one's


class ExpertFrequency:
    """How often each expert was needed of late."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._uses: dict[ExpertName, tuple[float, int]] = {}

    def use(self, expert: ExpertName, turn: int) -> None:
        """Counts a use in pass ``turn``."""
        self._uses[expert] = (self._aged(expert, turn) + 1.0, turn)

    def value(self, expert: ExpertName, turn: int) -> float:
        """What keeping an expert is worth."""
        return self._aged(expert, turn) * (1.0 + _SHALLOW * (self._layers - expert[0]) / self._layers)

    def least(
        self, held: Iterable[ExpertName], spared: Collection[ExpertName], turn: int
    ) -> ExpertName | None:
        """The expert to give way, of those held that are not spared."""
        return min(
            (one for one in held if one not in spared),
            key=lambda one: (self.value(one, turn), one),
            default=None,
        )

    def _aged(self, expert: ExpertName, turn: int) -> float:
        uses, last = self._uses.get(expert, (0.0, turn))
        return uses * _AGEING ** (turn - last)


def optimal_hits(trace: Sequence[ExpertName], capacity: int) -> int:
    """Hits of the best possible cache of ``capacity`` experts, which knows the whole trace (Belady, IBM Systems Journal 5, 1966)."""
    following: list[int] = [len(trace)] * len(trace)
    seen: dict[ExpertName, int] = {}
    for place in range(len(trace) - 1, -1, -1):
        following[place] = seen.get(trace[place], len(trace) + place)
        seen[trace[place]] = place
    held: dict[ExpertName, int] = {}
    furthest: list[tuple[int, ExpertName]] = []
    hits = 0
    for place, expert in enumerate(trace):
        if expert in held:
            hits += 1
        elif len(held) >= capacity:
            while True:
                when, victim = heapq.heappop(furthest)
                if held.get(victim) == -when:
                    del held[victim]
                    break
        held[expert] = following[place]
        heapq.heappush(furthest, (-following[place], expert))
    return hits


_NOW: Urgency = (-1, 0)


@dataclass
class _Held:
    slot: int
    reading: list[Future[None]]


class ExpertCache:
    """At most ``slots`` experts of all layers; one thread asks."""

    def __init__(self, pack: PackFile, pool: ReadPool, slots: int, statistics: StreamStatistics) -> None:
        sections = pack.index.sections
        self._numbers = {
            (one.layer, one.expert): number for number, one in enumerate(sections) if one.kind == "expert"
        }
        self._pack, self._pool, self._statistics = pack, pool, statistics
        size = max(padded_bytes(sections[number].nbytes) for number in self._numbers.values())
        memory = page_aligned(slots * size)
        self._memory = [memory[place * size : (place + 1) * size] for place in range(slots)]
        self._free = list(range(slots))
        self._held: dict[ExpertName, _Held] = {}
        self._frequency = ExpertFrequency(1 + max(layer for layer, _ in self._numbers))
        self.slots = slots
        self.trace: list[ExpertName] | None = None
        """Every expert that was needed, in turn, if it is a list."""

    def need(self, layer: int, experts: Collection[int], turn: int) -> None:
        """Begins to read what of a layer's chosen ``experts`` is not there, as many as there is room for."""
        names = [(layer, expert) for expert in experts]
        for name in names:
            self._frequency.use(name, turn)
            if name in self._held:
                self._statistics.expert_hits += 1
                self._hurry(name)
            else:
                self._statistics.expert_misses += 1
        if self.trace is not None:
            self.trace += names
        wanted = set(names)
        for name in names:
            if name not in self._held and not self._read(name, wanted, turn, _NOW):
                break

    def prefetch(self, layer: int, experts: Iterable[int], spared: Collection[ExpertName], turn: int) -> None:
        """Begins to read experts that a layer will probably choose; what this layer needs stays."""
        names = [(layer, expert) for expert in experts][: max(1, self.slots // 4)]
        kept = {*spared, *names}
        for name in names:
            if name not in self._held:
                if not self._read(name, kept, turn, (turn << 20 | layer, 2)):
                    return
                self._statistics.prefetched += 1

    def get(self, expert: ExpertName, still_needed: Collection[ExpertName], turn: int) -> ByteArray:
        """The bytes of an expert, valid until the next call. Raises what reading it raised."""
        if expert not in self._held and not self._read(expert, still_needed, turn, _NOW):
            # All room is taken by what this layer still needs: what it needs last gives way, and is read again.
            self._drop(max(one for one in self._held if one != expert))
            self._read(expert, (), turn, _NOW)
        held = self._held[expert]
        try:
            self._statistics.expert_stall_s += wait(held.reading, f"{self._pack.path}, expert {expert}")
        except BaseException:
            self._drop(expert)
            raise
        held.reading = []
        return self._memory[held.slot][: self._pack.index.sections[self._numbers[expert]].nbytes]

    def _hurry(self, expert: ExpertName) -> None:
        """Lets a read that still waits, as one that was only guessed, go before all others."""
        held = self._held[expert]
        if held.reading and held.reading[0].cancel():
            for future in held.reading[1:]:
                if not future.cancel():
                    future.exception()
            number = self._numbers[expert]
            held.reading = read_ahead(self._pack, self._pool, number, self._memory[held.slot], _NOW)

    def _read(self, expert: ExpertName, spared: Collection[ExpertName], turn: int, urgency: Urgency) -> bool:
        if not self._free:
            victim = self._frequency.least(self._held, spared, turn)
            if victim is None:
                return False
            self._drop(victim)
        slot, number = self._free.pop(), self._numbers[expert]
        reading = read_ahead(self._pack, self._pool, number, self._memory[slot], urgency)
        self._held[expert] = _Held(slot, reading)
        self._statistics.bytes_read += self._pack.index.sections[number].nbytes
        return True

    def _drop(self, expert: ExpertName) -> None:
        held = self._held.pop(expert)
        for future in held.reading:
            if not future.cancel():
                future.exception()
        self._free.append(held.slot)

"""The ring: layers' weights are read into a few buffers, in the order of layers, pass after pass, ahead of whoever computes with them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import partial

from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.pack.layout import CHUNK_BYTES, padded_bytes
from phalanx.checkpoint.pack.reader import PackFile
from phalanx.serve.weights.read_pool import ReadPool, Urgency

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

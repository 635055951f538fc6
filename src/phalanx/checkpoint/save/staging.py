"""Staging buffers: the memory copy that is all a save costs the training step.

The image that will be written is laid out in a page-aligned buffer that is kept from save to save, so that staging
is one memory copy (by several threads: one core does not saturate memory) into pages that are already mapped; fresh
pages cost many times the copy. The writer streams the buffer out meanwhile. While a buffer is being written, the
next save takes the second one if there is one, else it waits, and says for how long.

On CUDA the buffer is registered as pinned memory, and the copies run on a side stream: ``fence()``, called before the
weights are next changed, keeps the optimizer from overtaking them.
"""

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from phalanx.checkpoint.format.image import PAGE_BYTES, ByteArray, Image, ImageLayout, image_layout
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.save.image_copy import ImageCopier, on_cuda, pin, unpin


@dataclass(eq=False, slots=True)
class _Buffer:
    data: ByteArray
    pinned: bool = False
    layout: ImageLayout | None = None


@dataclass(frozen=True, slots=True)
class StagedImage:
    """An image in a staging buffer, to be given back with ``Staging.release`` when it has been written."""

    image: Image
    waited_s: float
    copied_s: float
    buffer: _Buffer
    copied: "torch.cuda.Event | None" = None
    # Memory that a side stream still reads must not be given to another tensor.
    sources: tuple[Shard, ...] = field(default=(), repr=False)

    def wait(self) -> Image:
        """The image once all of its bytes are there. Called by the writer, not by the training step."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.image


class Staging:
    """At most ``buffers`` buffers, each as large as the largest image so far. ``stage`` is for one thread at a time."""

    def __init__(self, *, buffers: int = 1) -> None:
        if buffers < 1:
            raise ValueError(f"buffers = {buffers}: must be at least 1")
        self._most = buffers
        self._made = 0
        self._free: list[_Buffer] = []
        self._returned = threading.Condition()
        self._copier = ImageCopier()
        # The boxes of a rank are the same at every save.
        self._layout_of = lru_cache(maxsize=1)(image_layout)

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Makes every buffer and maps its pages now, so that the first save is as quick as the later ones."""
        layout = self._layout_of(tuple(shard.box for shard in shards))
        with self._returned:
            fresh = [self._new_buffer(layout.nbytes, on_cuda(shards)) for _ in range(self._most - self._made)]
            self._made = self._most
            self._free += fresh

    def stage(self, shards: Sequence[Shard]) -> StagedImage:
        """Copies the shards into an image. Blocks until a buffer is free, then for one memory copy."""
        begin = time.perf_counter()
        layout = self._layout_of(tuple(shard.box for shard in shards))
        buffer = self._acquire(layout.nbytes, on_cuda(shards))
        acquired = time.perf_counter()
        try:
            copied = self._fill(buffer, layout, shards)
        except BaseException:
            self._give_back(buffer)
            raise
        image = Image(layout, buffer.data)
        times = (acquired - begin, time.perf_counter() - acquired)
        return StagedImage(image, *times, buffer, copied, tuple(shards) if copied else ())

    def release(self, staged: StagedImage) -> None:
        """Gives the buffer back for the next save."""
        self._give_back(staged.buffer)

    def fence(self) -> None:
        """To be called before weights change: device copies that still run come first. Does not block the host."""
        self._copier.fence()

    def close(self) -> None:
        """Stops the copying threads and lets the free buffers go."""
        self._copier.close()
        with self._returned:
            for buffer in self._free:
                _unpin(buffer)
            self._free.clear()
            self._made = self._most

    def _give_back(self, buffer: _Buffer) -> None:
        with self._returned:
            self._free.append(buffer)
            self._returned.notify()

    def _fill(
        self, buffer: _Buffer, layout: ImageLayout, shards: Sequence[Shard]
    ) -> "torch.cuda.Event | None":
        if buffer.layout is not layout:
            buffer.data[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
            buffer.layout = layout
        return self._copier.copy(layout, shards, buffer.data)

    def _acquire(self, nbytes: int, pinned: bool) -> _Buffer:
        with self._returned:
            if not self._free and self._made < self._most:
                self._made += 1
                return self._new_buffer(nbytes, pinned)
            self._returned.wait_for(lambda: bool(self._free))
            buffer = self._free.pop()
        if buffer.data.nbytes < nbytes or (pinned and not buffer.pinned):
            _unpin(buffer)
            return self._new_buffer(nbytes, pinned)
        return buffer

    def _new_buffer(self, nbytes: int, pinned: bool) -> _Buffer:
        capacity = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, capacity)
        # Advice: kernels without huge pages refuse it, and nothing but speed is lost.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(memory, dtype=np.uint8)
        self._copier.fill_zeros(data)
        if pinned:
            pin(data)
        return _Buffer(data, pinned)


def _unpin(buffer: _Buffer) -> None:
    if buffer.pinned:
        unpin(buffer.data)
        buffer.pinned = False

"""Staging buffers: the memory copy that is a save's only cost to the training step, by threads or on a CUDA side stream.

The image is laid out in a page-aligned buffer that is reused by every save. So staging is one memory copy into mapped pages; fresh pages
cost many times as much. Several threads copy, because one core does not saturate memory. Meanwhile the writer streams the buffer out. The
next save takes the second buffer if there is one, else it waits, and reports for how long.

On CUDA the buffer is registered as pinned memory, and the copies run on a side stream. ``fence()``, called before the weights next change,
prevents the optimizer from overtaking them.
"""

import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.image import PAGE_BYTES, ByteArray, Image, ImageLayout, image_layout
from phalanx.hardware.kernels.choose import Share, shares_of

# The copy of tensors into an image: by several threads, or on CUDA on a side stream.

COPY_THREADS = 2
_ZERO_BYTES = 16 << 20


class ImageCopier:
    """Copies shards into images; ``copy`` is for one thread at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(COPY_THREADS, "checkpoint-stage")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last_copied: list[tuple[torch.device, torch.cuda.Event]] = []
        """Events at the end of copies that no fence has waited for yet, with their devices."""

    def copy(
        self, layout: ImageLayout, shards: Sequence[Shard], image: ByteArray
    ) -> "torch.cuda.Event | None":
        """Copy ``shards`` to their places in ``image``; the header is not written. Copies from GPUs may run until the
        returned event; None if there are none.
        """
        tensors = {shard.box: shard.tensor for shard in shards}
        simple: list[tuple[ByteArray, ByteArray]] = []
        devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for entry in layout.entries:
            target, tensor = image[entry.start : entry.stop], tensors[entry.box]
            if tensor.is_cuda:
                devices.setdefault(tensor.device, []).append((_tensor_over(target, tensor), tensor))
            elif tensor.is_contiguous() and tensor.numel():
                simple.append((target, tensor.detach().reshape(-1).view(torch.uint8).numpy()))
            elif tensor.numel():
                _tensor_over(target, tensor).copy_(tensor.detach())
        copied = self._copy_from_device(devices)
        self._copy_in_parallel(simple)
        return copied

    def fill_zeros(self, data: ByteArray) -> None:
        """Write to every page of fresh memory, so that the first copy is as fast as later ones."""
        parts = [data[start : start + _ZERO_BYTES] for start in range(0, data.nbytes, _ZERO_BYTES)]
        list(self._pool.map(lambda part: part.fill(0), parts))

    def fence(self) -> None:
        """Order running device copies before later changes of the weights. Call it before they change. Does not block the host."""
        for device, copied in self._last_copied:
            torch.cuda.current_stream(device).wait_event(copied)
        self._last_copied = []

    def close(self) -> None:
        """Stop the copying threads."""
        self._pool.shutdown()

    def _copy_in_parallel(self, pairs: Sequence[tuple[ByteArray, ByteArray]]) -> None:
        """Copy the pairs (target, source) in threads, each about the same number of bytes."""

        def copy(share: Share) -> None:
            for pair, start, nbytes in share:
                target, source = pairs[pair]
                np.copyto(target[start : start + nbytes], source[start : start + nbytes])

        list(self._pool.map(copy, shares_of([target.nbytes for target, _ in pairs], COPY_THREADS)))

    def _copy_from_device(
        self, devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]
    ) -> "torch.cuda.Event | None":
        """Queue copies from GPUs on a stream of their own, after the current stream's work; return the last one's event."""
        copied = None
        for device, pairs in devices.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, tensor in pairs:
                    target.copy_(tensor.detach(), non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(stream)
            self._last_copied.append((device, copied))
        return copied


def on_cuda(shards: Sequence[Shard]) -> bool:
    """Return True if an image of these shards should be pinned."""
    return any(shard.tensor.is_cuda for shard in shards)


def pin(data: ByteArray) -> None:
    """Register memory with CUDA, so that copies into it are asynchronous and fast. Raises CheckpointError."""
    status = int(_cudart().cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    if status:
        raise CheckpointError(
            f"cannot pin {data.nbytes:,} bytes of host memory (CUDA error {status}); raise ulimit -l"
        )


def unpin(data: ByteArray) -> None:
    """Undo ``pin``."""
    _cudart().cudaHostUnregister(data.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _tensor_over(target: ByteArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(target).view(like.dtype).view(like.shape)


@dataclass(eq=False, slots=True)
class _Buffer:
    data: ByteArray
    pinned: bool = False
    layout: ImageLayout | None = None


@dataclass(frozen=True, slots=True)
class StagedImage:
    """An image in a staging buffer, to be returned with ``StagingBuffers.release`` after it has been written."""

    image: Image
    waited_s: float
    copied_s: float
    buffer: _Buffer
    copied: "torch.cuda.Event | None" = None
    # Referenced so that memory that a side stream still reads is not reused.
    sources: tuple[Shard, ...] = field(default=(), repr=False)

    def wait(self) -> Image:
        """Return the image after all of its bytes have been copied. Called by the writer, not by the training step."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.image


class StagingBuffers:
    """At most ``buffers`` buffers, each as large as the largest image so far. ``stage`` is for one thread at a time."""

    def __init__(self, *, buffers: int = 1) -> None:
        """Use at most ``buffers`` buffers, at least 1 (else ValueError); none is allocated yet."""
        if buffers < 1:
            raise ValueError(f"buffers = {buffers}: must be at least 1")
        self._most = buffers
        self._allocated = 0
        self._free: list[_Buffer] = []
        self._returned = threading.Condition()
        self._copier = ImageCopier()
        # The boxes of a rank are the same at every save.
        self._layout_of = lru_cache(maxsize=1)(image_layout)

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Allocate every buffer that does not exist yet and map its pages now, so that the first save is as fast as
        later ones.

        Buffers for tensors on GPUs are pinned.
        """
        layout = self._layout_of(tuple(shard.box for shard in shards))
        with self._returned:
            fresh = [
                self._new_buffer(layout.nbytes, on_cuda(shards)) for _ in range(self._most - self._allocated)
            ]
            self._allocated = self._most
            self._free += fresh

    def stage(self, shards: Sequence[Shard]) -> StagedImage:
        """Copy the shards into an image.

        Blocks until a buffer is free, then for one memory copy. The copy from a GPU may still run; ``StagedImage.wait``
        waits for it.
        """
        begin = time.perf_counter()
        layout = self._layout_of(tuple(shard.box for shard in shards))
        buffer = self._acquire(layout.nbytes, on_cuda(shards))
        acquired = time.perf_counter()
        try:
            if buffer.layout is not layout:
                buffer.data[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
                buffer.layout = layout
            copied = self._copier.copy(layout, shards, buffer.data)
        except BaseException:
            self._give_back(buffer)
            raise
        image = Image(layout, buffer.data)
        times = (acquired - begin, time.perf_counter() - acquired)
        return StagedImage(image, *times, buffer, copied, tuple(shards) if copied else ())

    def release(self, staged: StagedImage) -> None:
        """Return the buffer for the next save."""
        self._give_back(staged.buffer)

    def fence(self) -> None:
        """Order running device copies before later changes of the weights. Call it before they change. Does not block the host."""
        self._copier.fence()

    def close(self) -> None:
        """Stop the copying threads and unpin and free the unused buffers. Do not call ``stage`` after it: it may wait forever."""
        self._copier.close()
        with self._returned:
            for buffer in self._free:
                _unpin(buffer)
            self._free.clear()
            self._allocated = self._most

    def _give_back(self, buffer: _Buffer) -> None:
        """Return a buffer to the free ones, and wake a waiting save."""
        with self._returned:
            self._free.append(buffer)
            self._returned.notify()

    def _acquire(self, nbytes: int, pinned: bool) -> _Buffer:
        """Return a free buffer of at least ``nbytes``, pinned if ``pinned``; blocks while all are in use. A buffer
        that is too small or not pinned is replaced by a new one.
        """
        with self._returned:
            if not self._free and self._allocated < self._most:
                self._allocated += 1
                return self._new_buffer(nbytes, pinned)
            self._returned.wait_for(lambda: bool(self._free))
            buffer = self._free.pop()
        if buffer.data.nbytes < nbytes or (pinned and not buffer.pinned):
            _unpin(buffer)
            return self._new_buffer(nbytes, pinned)
        return buffer

    def _new_buffer(self, nbytes: int, pinned: bool) -> _Buffer:
        """Allocate a buffer of full pages, touch its pages, and pin it for copies from GPUs if ``pinned``."""
        capacity = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, capacity)
        # Advice: kernels without huge pages refuse it, which costs only speed.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(memory, dtype=np.uint8)
        self._copier.fill_zeros(data)
        if pinned:
            pin(data)
        return _Buffer(data, pinned)


def _unpin(buffer: _Buffer) -> None:
    """Unpin a buffer's memory, if it is pinned."""
    if buffer.pinned:
        unpin(buffer.data)
        buffer.pinned = False

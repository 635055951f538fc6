"""Fills an image with the bytes of tensors: one memory copy by several threads, or on CUDA on a side stream.

One core does not saturate memory, so the bytes are divided evenly over a few threads. On CUDA the image is pinned memory and
the copies run on a stream of their own: ``fence()``, called before the weights are next changed, keeps the optimizer from
overtaking them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.image import ByteArray, ImageLayout
from phalanx.checkpoint.format.shards import Shard

COPY_THREADS = 2
_ZERO_BYTES = 16 << 20


class ImageCopier:
    """Copies shards into images; ``copy`` is for one thread at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(COPY_THREADS, "checkpoint-stage")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last_copied: list[tuple[torch.device, torch.cuda.Event]] = []
        """The ends of the copies that no fence has waited for yet, with the devices that they are from."""

    def copy(
        self, layout: ImageLayout, shards: Sequence[Shard], image: ByteArray
    ) -> "torch.cuda.Event | None":
        """Fills ``image``, but for its header. Copies from a device may run on until the event that is returned."""
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
        """Writes to every page of fresh memory, so that the first copy is as quick as the later ones."""
        parts = [data[start : start + _ZERO_BYTES] for start in range(0, data.nbytes, _ZERO_BYTES)]
        list(self._pool.map(lambda part: part.fill(0), parts))

    def fence(self) -> None:
        """To be called before weights change: device copies that still run come first. Does not block the host."""
        for device, copied in self._last_copied:
            torch.cuda.current_stream(device).wait_event(copied)
        self._last_copied = []

    def close(self) -> None:
        """Stops the copying threads."""
        self._pool.shutdown()

    def _copy_in_parallel(self, pairs: Sequence[tuple[ByteArray, ByteArray]]) -> None:
        total = sum(target.nbytes for target, _ in pairs)
        each = -(-total // COPY_THREADS) or 1
        bins: list[list[tuple[ByteArray, ByteArray]]] = [[]]
        room = each
        for target, source in pairs:
            start = 0
            while start < target.nbytes:
                if not room:
                    bins.append([])
                    room = each
                stop = min(start + room, target.nbytes)
                bins[-1].append((target[start:stop], source[start:stop]))
                room -= stop - start
                start = stop
        list(self._pool.map(_copy_all, bins))

    def _copy_from_device(
        self, devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]
    ) -> "torch.cuda.Event | None":
        copied = None
        for device, pairs in devices.items():
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, tensor in pairs:
                    target.copy_(tensor.detach(), non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(stream)
            self._last_copied.append((device, copied))
        return copied

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def on_cuda(shards: Sequence[Shard]) -> bool:
    """True if an image of these shards should be pinned."""
    return any(shard.tensor.is_cuda for shard in shards)


def pin(data: ByteArray) -> None:
    """Registers memory with CUDA, so that copies into it are asynchronous and quick. Raises CheckpointError."""
    status = int(_cudart().cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    if status:
        raise CheckpointError(
            f"cannot pin {data.nbytes:,} bytes of host memory (CUDA error {status}); raise ulimit -l"
        )


def unpin(data: ByteArray) -> None:
    """Undoes ``pin``."""
    _cudart().cudaHostUnregister(data.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _tensor_over(target: ByteArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(target).view(like.dtype).view(like.shape)


def _copy_all(pairs: Sequence[tuple[ByteArray, ByteArray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)

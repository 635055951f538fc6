"""An optimizer's state that lives in host memory or in a file, and visits the accelerator a piece at a time.

An optimizer works through its state in pieces anyhow (see ``phalanx.train.optimizers.adamw``). ``MomentStore.zeros`` gives
it memory elsewhere, and ``MomentStore.visiting`` takes its pieces to the device and back while the neighboring pieces are
computed with. The numbers, and so the bits, are those of a state that stays. On a CPU a state in a file is mapped into
memory and worked on where it is; the operating system writes it out and reads it in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.local.device import on_gpu
from phalanx.parallel.mesh.torch_compat import cuda_stream
from phalanx.run.spec import MemorySpec
from phalanx.train.transforms.offload import Regions

UpdatePiece = tuple[list[Tensor], ...]
"""The tensors of one launch of an optimizer: weights, gradients, moments, each a list of flat tensors."""


class MomentStore:
    """Where the optimizer's state of one rank lives, as ``spec.offload_optimizer`` says."""

    def __init__(self, spec: MemorySpec, device: torch.device) -> None:
        self._device, self._pinned = device, spec.offload_optimizer == "host" and on_gpu(device)
        self._regions = Regions(Path(spec.offload_path)) if spec.offload_optimizer == "file" else None
        self._streams = (cuda_stream(device), cuda_stream(device)) if on_gpu(device) else None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A plain tensor of zeros that lives in the store. Raises ``OffloadError`` if the disk is full."""
        if self._pinned:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        length = math.prod(shape) * dtype.itemsize
        if self._regions is None or not length:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        # Fresh parts of a file read as zeros.
        data = self._regions.mapped(length)
        return torch.from_numpy(data).view(dtype).view(shape)

    def visiting(self, pieces: Iterable[UpdatePiece]) -> Iterator[UpdatePiece]:
        """The same pieces, each with all of its tensors on the device while it is worked on.

        What the caller writes to them in place is in the store when the iteration has ended.
        """
        if self._streams is None:
            yield from pieces
            return
        incoming, outgoing = self._streams
        here = torch.cuda.current_stream(self._device)
        arriving: _Visit | None = None
        for piece in pieces:
            arrived, arriving = arriving, _arrive(piece, self._device, incoming)
            if arrived is not None:
                yield from _work(arrived, here, outgoing)
        if arriving is not None:
            yield from _work(arriving, here, outgoing)
        # A checkpoint may read the store next.
        outgoing.synchronize()


@dataclass
class _Visit:
    """A piece whose tensors are on their way to the device."""

    home: UpdatePiece
    away: UpdatePiece
    arrived: torch.cuda.Event


def _arrive(piece: UpdatePiece, device: torch.device, stream: torch.cuda.Stream) -> _Visit:
    with torch.cuda.stream(stream):
        away = tuple(
            [tensor.to(device, non_blocking=True) if tensor.device != device else tensor for tensor in column]
            for column in piece
        )
        return _Visit(piece, away, stream.record_event())


def _work(visit: _Visit, here: torch.cuda.Stream, outgoing: torch.cuda.Stream) -> Iterator[UpdatePiece]:
    here.wait_event(visit.arrived)
    yield visit.away
    outgoing.wait_stream(here)
    with torch.cuda.stream(outgoing):
        for home, away in zip(visit.home, visit.away, strict=True):
            for tensor, copy in zip(home, away, strict=True):
                if tensor is not copy:
                    # It was allocated on the way in, and used here and on the way out.
                    copy.record_stream(here)
                    copy.record_stream(outgoing)
                    tensor.copy_(copy, non_blocking=True)

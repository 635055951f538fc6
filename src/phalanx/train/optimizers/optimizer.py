"""Interface of all optimizers, and the memory in which they keep their state.

An optimizer on one rank knows the parameters that this rank holds a part of. It lists what it keeps between steps as
``StatePart``s: rectangular boxes of named tensors whose shapes depend on the model alone. So one fleet can load the state
that another fleet saved.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.hardware.local.device import on_gpu
from phalanx.parallel.divisions import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.parallel.torch_compat import cuda_stream, local_slice_of
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import MemorySpec, OptimizerSpec
from phalanx.train.activations import Regions


@dataclass(frozen=True)
class StatePart:
    """This rank's part of one named tensor of the optimizer's state."""

    tensor: Tensor
    """A plain tensor that shares memory with the optimizer's own."""
    full_shape: tuple[int, ...]
    """Shape of the named tensor."""
    offset: tuple[int, ...]
    """Where ``tensor`` begins in it."""
    like: str = ""
    """The parameter of which each rank holds the corresponding part; empty if nobody else in this replica holds it."""


class Optimizer(Protocol):
    """Turns gradients into changes of the weights, on every rank together."""

    @abstractmethod
    def step(self, number: int, lr: float, gradient_scale: float, *, keep_change: bool = False) -> None:
        """Apply update ``number`` (from 1) with the gradients of the parameters, times ``gradient_scale``. Changes weights and
        state in place.

        With ``keep_change``, each gradient contains the change of its weights afterwards, at the cost of a copy of one
        piece of the weights at a time. Raises ``RuntimeError`` if a parameter has no gradient.
        """

    @abstractmethod
    def state(self) -> dict[str, list[StatePart]]:
        """This rank's part of the state, by names such as ``exp_avg/blocks.0.ffn.up.weight``."""


@dataclass(frozen=True)
class Several(Optimizer):
    """Different optimizers for different parameters."""

    parts: Sequence[Optimizer]

    def step(self, number: int, lr: float, gradient_scale: float, *, keep_change: bool = False) -> None:
        for part in self.parts:
            part.step(number, lr, gradient_scale, keep_change=keep_change)

    def state(self) -> dict[str, list[StatePart]]:
        return {name: tensors for part in self.parts for name, tensors in part.state().items()}


def decays(parameter: Parameter, spec: OptimizerSpec) -> bool:
    """True if weight decay applies to the parameter."""
    if parameter.kind in ("norm", "bias"):
        return spec.decay_norms
    return spec.decay_embeddings if parameter.kind == "embedding" else True


def boxes_of(
    parameters: Mapping[str, nn.Parameter], boxes: Mapping[str, LocalSlice] | None
) -> dict[str, LocalSlice]:
    """Return the place of this rank's part of each parameter: by ``boxes``, else by its DTensor."""
    return {
        name: boxes[name] if boxes else local_slice_of(parameter) for name, parameter in parameters.items()
    }


@contextmanager
def change_kept(weights: Sequence[Tensor], grads: Sequence[Tensor], *, keep: bool) -> Iterator[None]:
    """Context of an update of ``weights``. With ``keep``, ``grads``, of the same shapes, contain the change of the
    weights afterwards; else do nothing.
    """
    before = [weight.clone() for weight in weights] if keep else []
    yield
    for old, weight, grad in zip(before, weights, grads, strict=False):
        grad.copy_(weight - old)


def gradient_of(name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient. Raises ``RuntimeError`` if there is none."""
    if parameter.grad is None:
        raise RuntimeError(f"{name} has no gradient to step with")
    return local(parameter.grad)


# Optimizer state in host memory or in a file, moved to the accelerator piece by piece.
#
# Optimizers process their state in pieces (``phalanx.train.optimizers.adamw``). ``MomentStore.zeros`` allocates the state
# elsewhere, and ``MomentStore.visiting`` moves pieces to the device and back while other pieces are computed. The numbers, and
# so the bits, are those of state on the device. On a CPU, a file is mapped into memory and updated in place; the operating
# system reads and writes it.


VISITING_ELEMENTS = 1 << 26
"""Elements of a tensor that visit the accelerator at once: enough to hide copies, and few beside a model."""
UpdatePiece = tuple[list[Tensor], ...]
"""The tensors of one launch of an optimizer: weights, gradients, moments, each a list of flat tensors."""


class MomentStore:
    """Where the optimizer's state of one rank lives, by ``spec.offload_optimizer``."""

    def __init__(self, spec: MemorySpec, device: torch.device) -> None:
        self._device, self._pinned = device, spec.offload_optimizer == "host" and on_gpu(device)
        self._regions = Regions(Path(spec.offload_path)) if spec.offload_optimizer == "file" else None
        self._streams = (cuda_stream(device), cuda_stream(device)) if on_gpu(device) else None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of zeros in the store: pinned host memory, the file, or, if neither applies or it is empty,
        memory of the device. Raises ``OffloadError`` if the disk is full.
        """
        if self._pinned:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        length = math.prod(shape) * dtype.itemsize
        if self._regions is None or not length:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        # Fresh parts of a file read as zeros.
        data = self._regions.mapped(length)
        return torch.from_numpy(data).view(dtype).view(shape)  # (*shape,)

    def visiting(self, pieces: Iterable[UpdatePiece]) -> Iterator[UpdatePiece]:
        """Yield the same pieces, each with all of its tensors on the device while the caller works on it. The next piece is
        prefetched.

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
    """Start copies of all tensors of ``piece`` that are not on ``device``, on ``stream``; the others are used as they are."""
    with torch.cuda.stream(stream):
        away = tuple(
            [tensor.to(device, non_blocking=True) if tensor.device != device else tensor for tensor in column]
            for column in piece
        )
        return _Visit(piece, away, stream.record_event())


def _work(visit: _Visit, here: torch.cuda.Stream, outgoing: torch.cuda.Stream) -> Iterator[UpdatePiece]:
    """Yield a piece on the device once it has arrived, then start the copies back to its home."""
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

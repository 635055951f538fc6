"""The stages of a model as its first one has them: it sends each the states of the one before, and carries what they tell to the next.

All connections end here: states go back and forth once for each stage, which is small beside what the layers compute, and a stage knows nothing of the
others. What becomes of texts and pages waits for the next message, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.serve.engine.errors import PartLostError
from phalanx.serve.engine.part import Ask, FarSpan, Readings
from phalanx.serve.stages import messages as m
from phalanx.serve.stages.link import StageLink

_T = TypeVar("_T", bound=m.FromStage)


@dataclass
class FarStage:
    """One of them."""

    number: int
    """From 1: the first stage is the process itself."""
    layers: range
    link: StageLink
    errands: list[m.Errand] = field(default_factory=list)
    """What it is to do before the next."""

    def due(self) -> tuple[m.Errand, ...]:
        """The errands, which are sent with the next message."""
        found = tuple(self.errands)
        self.errands.clear()
        return found

    def __str__(self) -> str:
        return f"stage {self.number} (layers {self.layers.start} to {self.layers.stop - 1}, {self.link.peer})"


class FarStages:
    """``phalanx.serve.engine.part.FarLayers`` of connected processes. Methods raise PartLostError once one of them is gone."""

    def __init__(self, stages: Sequence[FarStage], most_layers: int, layer_page_bytes: int) -> None:
        """``layer_page_bytes`` is what a layer's part of a page takes."""
        self._far = list(stages)
        self.stages, self.most_layers = len(stages) + 1, most_layers
        self._page_bytes = [len(one.layers) * layer_page_bytes for one in stages]
        self.page_bytes = sum(self._page_bytes)

    def hold(self, pages: int) -> None:
        """Has each stage make room for so many pages."""
        for stage in self._far:
            self._say(stage, m.Hold(pages))
        for stage in self._far:
            self._hear(stage, m.Held)

    def compute(self, states: Tensor, spans: Sequence[FarSpan], length: int, asks: Sequence[Ask]) -> Readings:
        """See ``FarLayers``."""
        readings: Readings = ()
        for stage in self._far:
            body = bytes_of(states)
            wanted = tuple(asks) if stage is self._far[-1] else ()
            self._say(stage, m.Compute(stage.due(), tuple(spans), length, wanted, len(body)), body)
            passed = self._hear(stage, m.Passed)
            if passed.nbytes:
                states = tensor_of(self._body(stage, passed.nbytes), states.dtype, states.shape[1])
            readings = passed.readings
        return readings

    def drop(self, piece: int) -> None:
        """See ``FarLayers``."""
        self._later(m.Drop(piece))

    def copy_in(self, piece: int, number: int, place: int) -> None:
        """See ``FarLayers``."""
        self._later(m.CopyIn(piece, number, place))

    def copy_out(self, piece: int, number: int, place: int) -> None:
        """See ``FarLayers``."""
        self._later(m.CopyOut(piece, number, place))

    def read(self, place: int) -> bytes:
        """See ``FarLayers``."""
        parts = []
        for stage in self._far:
            self._say(stage, m.ReadPage(stage.due(), place))
            parts.append(bytes(self._body(stage, self._hear(stage, m.Page).nbytes)))
        return b"".join(parts)

    def write(self, place: int, content: bytes) -> None:
        """See ``FarLayers``."""
        begin = 0
        for stage, nbytes in zip(self._far, self._page_bytes, strict=True):
            self._say(
                stage, m.WritePage(stage.due(), place, nbytes), memoryview(content)[begin : begin + nbytes]
            )
            begin += nbytes

    def trouble(self) -> str:
        """Which stage is gone; empty if none is. From any thread."""
        return next(
            (_gone(stage, "its connection has ended") for stage in self._far if stage.link.ended()), ""
        )

    def close(self) -> None:
        """Ends all connections, with which the stages end."""
        for stage in self._far:
            stage.link.close()

    def _later(self, errand: m.Errand) -> None:
        for stage in self._far:
            stage.errands.append(errand)

    def _say(self, stage: FarStage, message: m.ToStage, body: memoryview | bytes = b"") -> None:
        try:
            stage.link.say(message, body)
        except (CheckpointError, OSError) as error:
            raise self._lost(stage, error) from error

    def _hear(self, stage: FarStage, kind: type[_T]) -> _T:
        try:
            message = m.from_stage.decode(stage.link.hear())
        except (CheckpointError, OSError, msgspec.MsgspecError) as error:
            raise self._lost(stage, error) from error
        if isinstance(message, m.Unable):
            raise self._lost(stage, RuntimeError(message.why))
        if isinstance(message, m.Failed):
            raise RuntimeError(f"{stage}: {message.why}")
        if not isinstance(message, kind):
            raise self._lost(stage, RuntimeError(f"it answers with {type(message).__name__}"))
        return message

    def _body(self, stage: FarStage, nbytes: int) -> bytearray:
        try:
            return stage.link.body(nbytes)
        except (CheckpointError, OSError) as error:
            raise self._lost(stage, error) from error

    def _lost(self, stage: FarStage, error: Exception) -> PartLostError:
        self.close()
        return PartLostError(_gone(stage, str(error)))


def _gone(stage: FarStage, why: str) -> str:
    return f"{stage} of the model is gone, so nothing can be computed: {why}"


def bytes_of(states: Tensor) -> memoryview:
    """The bytes of states, straight from their memory."""
    data: memoryview = states.contiguous().flatten().view(torch.uint8).numpy().data
    return data


def tensor_of(body: bytearray, dtype: torch.dtype, dim: int) -> Tensor:
    """States ``(rows, dim)`` of their bytes."""
    return torch.frombuffer(body, dtype=torch.uint8).view(dtype).view(-1, dim)

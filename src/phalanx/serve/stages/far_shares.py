"""The other shares of each layer, as the process with the first one has them, and that one as they have it.

All connections end in the first process. It says what rows a step has, and every process takes them through its share of each layer at the same time; wherever
what all have computed is needed whole (``phalanx.serve.stages.shares``), each sends its piece to the first, which sends all of them to each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Thread

import torch
from torch import Tensor

from phalanx.model.layers.linear import Affine
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.errors import EngineError, PartLostError
from phalanx.serve.engine.model_runner import FarSpan
from phalanx.serve.engine.sampler import SamplerOutput, SamplingRequest
from phalanx.serve.kv_cache.memory import PageBytes
from phalanx.serve.kv_cache.page_boxes import PageBox
from phalanx.serve.stages import messages as m
from phalanx.serve.stages.far_stages import bytes_of
from phalanx.serve.stages.link import StageLink
from phalanx.serve.stages.shares import Share, assemble, held_share, keeps_heads
from phalanx.serve.stages.talk import Talk, gone, loss_of_idle

_LOOK_S = 1.0


@dataclass
class FarShare:
    """One of them."""

    share: Share
    link: StageLink
    errands: list[m.Errand] = field(default_factory=list)

    @property
    def talk(self) -> Talk:
        """A conversation with it."""
        return Talk(self, self.link)

    def due(self) -> tuple[m.Errand, ...]:
        """What it is to do before anything else."""
        found = tuple(self.errands)
        self.errands.clear()
        return found

    def __str__(self) -> str:
        return f"share {self.share.number} of {self.share.of} (of every layer, {self.link.peer})"


class FarShares:
    """``phalanx.serve.engine.model_runner.FarLayers`` and ``Assembly`` of connected processes. Once one of them is gone, methods raise PartLostError."""

    max_in_flight = 1

    def __init__(self, shares: Sequence[FarShare], spec: ModelSpec) -> None:
        self._far, self.shares = list(shares), len(shares) + 1
        self.kv_spec = held_share(spec, self.shares)
        heads = attention_kind(spec).cache_row(spec)[0]
        # All keep the latents, which are of no head.
        parts = [
            Share(number, self.shares).rows(heads) if keeps_heads(spec) else range(heads)
            for number in range(self.shares)
        ]
        boxes = [PageBox(range(spec.layers), part) for part in parts]
        self.own = boxes[0]
        self.boxes: Sequence[PageBox] = boxes[1:]
        self._model: Transformer | None = None
        self._lost, self._talking = "", Lock()
        Thread(target=self._look, name="look", daemon=True).start()

    def attach(self, model: Transformer, *, exact: bool) -> Affine | None:
        """See ``FarLayers``."""
        self._model = model
        return assemble(model, Share(0, self.shares), self, exact=exact)

    def hold(self, pages: int) -> None:
        """Has each process make room for so many pages."""
        with self._all() as far:
            for one in far:
                one.talk.send(m.Hold(pages))
            for one in far:
                one.talk.receive(m.Held)

    @contextmanager
    def step(
        self, tokens: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Iterator[Tensor]:
        """See ``FarLayers``: all compute the same rows within it."""
        assert self._model is not None, "the engine attaches it first"
        states = self._model.embedded(tokens)
        body = bytes_of(states)
        with self._all() as far:
            for one in far:
                one.talk.send(m.Compute(one.due(), tuple(spans), length, tuple(requests), len(body)), body)
            yield states

    def whole(self, piece: Tensor, dim: int = -1) -> Tensor:
        """See ``Assembly``."""
        found = self._gathered(piece, dim)
        body = bytes_of(found)
        for one in self._far:
            one.talk.send(m.Whole(len(body)), body)
        return found

    def scores(self, piece: Tensor) -> Tensor:
        """See ``Assembly``."""
        return self._gathered(piece, -1)

    def _gathered(self, piece: Tensor, dim: int) -> Tensor:
        pieces = [piece]
        for one in self._far:
            body = one.talk.body(one.talk.receive(m.Piece).nbytes)
            pieces.append(shaped(body, piece, dim))
        return torch.cat(pieces, dim)

    def compute(
        self,
        states: Tensor,  # noqa: ARG002
        spans: Sequence[FarSpan],  # noqa: ARG002
        length: int,  # noqa: ARG002
        requests: Sequence[SamplingRequest],  # noqa: ARG002
    ) -> Future[SamplerOutput]:
        """See ``FarLayers``: there are no layers behind these."""
        raise AssertionError("the last layer is here")

    def drop(self, piece: int) -> None:
        """See ``FarLayers``."""
        self._later(m.Drop(piece))

    def copy_in(self, piece: int, number: int, place: int) -> None:
        """See ``FarLayers``."""
        self._later(m.CopyIn(piece, number, place))

    def copy_out(self, piece: int, number: int, place: int) -> None:
        """See ``FarLayers``."""
        self._later(m.CopyOut(piece, number, place))

    def read(self, place: int) -> list[bytes]:
        """See ``FarLayers``."""
        with self._all() as far:
            return [
                bytes(one.talk.body(one.talk.request(m.ReadPage(one.due(), place), m.Page).nbytes))
                for one in far
            ]

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """See ``FarLayers``."""
        with self._all() as far:
            for one, part in zip(far, parts, strict=True):
                one.talk.send(m.WritePage(one.due(), place, len(part)), memoryview(part))

    def trouble(self) -> str:
        """Which process is gone; empty if none is. From any thread."""
        ended = (gone(one, "its connection has ended") for one in self._far if one.link.ended())
        return self._lost or next(ended, "")

    def close(self) -> None:
        """Ends all connections, with which the processes end."""
        self._lose(gone(self._far[0], "its connection was closed here"))

    def _later(self, errand: m.Errand) -> None:
        for one in self._far:
            one.errands.append(errand)

    @contextmanager
    def _all(self) -> Iterator[list[FarShare]]:
        """Within which all processes are talked to; if it does not come to its end, none of them knows where the others are."""
        with self._talking:
            if self._lost:
                raise PartLostError(self._lost)
            try:
                yield self._far
            except PartLostError as error:
                self._lose(str(error))
                raise
            except Exception as error:
                self._lose(
                    f"a step has failed in the first of the processes that share each layer, and the others cannot go on: {error!r}"
                )
                raise PartLostError(self._lost) from error

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for one in self._far:
            one.link.close()

    def _look(self) -> None:
        """Whether all are there while nothing is asked of them."""
        while not self._lost:
            time.sleep(_LOOK_S)
            if not self._talking.acquire(blocking=False):
                continue
            try:
                if why := next((why for one in self._far if (why := loss_of_idle(one, one.link))), ""):
                    self._lose(why)
            finally:
                self._talking.release()


class NearShare:
    """``Assembly`` of a process that is not the first, over its connection to that."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def whole(self, piece: Tensor, dim: int = -1) -> Tensor:
        """See ``Assembly``. Raises EngineError where the first process does not go on with the step."""
        self.scores(piece)
        answer = self._link.receive(m.TO_STAGE)
        if not isinstance(answer, m.Whole):
            raise EngineError(f"a step was broken off by {type(answer).__name__}")
        return shaped(self._link.receive_body(answer.nbytes), piece, dim)

    def scores(self, piece: Tensor) -> Tensor:
        """See ``Assembly``."""
        body = bytes_of(piece)
        self._link.send(m.Piece(len(body)), body)
        return piece


def shaped(body: bytearray, like: Tensor, dim: int) -> Tensor:
    """The tensor of some bytes: of the format and shape of another, but along ``dim``."""
    shape = list(like.shape)
    shape[dim] = 0
    if not body:
        return like.new_empty(shape)
    shape[dim] = -1
    return torch.frombuffer(body, dtype=torch.uint8).view(like.dtype).view(shape)

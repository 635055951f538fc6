"""Other processes of a divided model, as the process with its first layers or shares has them.

All connections end in the first process. They go back and forth once for each stage, which is small beside what the layers compute, and a stage
knows nothing of the others.

Stages: work is a *visit*, which goes from stage to stage in the order in which it was sent. Each stage has a thread here, so while it computes
some texts, those before it compute others. What becomes of texts and pages waits for the next visit, in its order.

Shares: the first process sends the rows of a step, and every process takes them through its share of each layer at the same time. Wherever all
results are needed together (``phalanx_serve.stages.shares``), each sends its piece to the first, which sends all of them to each.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.model.layers.dense import Affine
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.model_runner import FarSpan
from phalanx_serve.engine.sampler import SamplerOutput, SamplingRequest
from phalanx_serve.kv_cache.memory import PageBox, PageBytes
from phalanx_serve.stages import messages as m
from phalanx_serve.stages.messages import StageLink, StepFailedError, Talk, gone, loss_of_idle
from phalanx_serve.stages.shares import Share, assemble, held_share, keeps_heads
from phalanx_serve.traffic.events import EngineError, PartLostError

# Stages.


_R = TypeVar("_R")
_LOOK_S = 1.0
"""How often it is asked of a stage that has nothing to do whether it is there."""


@dataclass
class FarStage:
    """One of them."""

    number: int
    """From 1: the first stage is the process itself."""
    layers: range
    link: StageLink
    errands: deque[tuple[int, m.Errand]] = field(default_factory=deque)
    """What it is to do at the visit of that number, or the first one after it."""

    def due(self, visit: int) -> tuple[m.Errand, ...]:
        """The errands that go with a visit."""
        found = []
        while self.errands and self.errands[0][0] <= visit:
            found.append(self.errands.popleft()[1])
        return tuple(found)

    def __str__(self) -> str:
        return f"stage {self.number} (layers {self.layers.start} to {self.layers.stop - 1}, {self.link.peer})"


@dataclass(frozen=True)
class _Visit:
    """Something that every stage does in turn."""

    number: int
    at: Callable[[FarStage, Talk], None]
    arrived: Callable[[], None]
    failed: Callable[[Exception], None]


@dataclass
class _Rows:
    """The states of a step's rows on their way, and what the last stage reads of them."""

    states: Tensor
    readings: SamplerOutput = ()


class FarStages:
    """``phalanx_serve.engine.model_runner.FarLayers`` of connected processes. Once one of them is gone, methods and futures raise PartLostError."""

    def __init__(self, stages: Sequence[FarStage], spec: ModelSpec, most_layers: int) -> None:
        """``most_layers`` of ``spec`` are the most that a process has."""
        self._far, self.shares = list(stages), 1
        self.max_in_flight = len(stages) + 1
        self.kv_spec = replace(spec, layers=most_layers)
        heads = range(attention_kind(spec).cache_row(spec)[0])
        self.own = PageBox(range(stages[0].layers.start), heads)
        self.boxes: Sequence[PageBox] = [PageBox(one.layers, heads) for one in stages]
        self._number, self._lost, self._sending = 0, "", Lock()
        self._queues: list[queue.SimpleQueue[_Visit]] = [queue.SimpleQueue() for _ in stages]
        for place in range(len(stages)):
            Thread(target=self._relay, args=(place,), name=f"stage {place + 1}", daemon=True).start()

    def attach(self, model: Transformer, *, exact: bool) -> Affine | None:  # noqa: ARG002
        """See ``FarLayers``: layers of other processes change nothing of those that are here."""
        return None

    def hold(self, pages: int) -> None:
        """Has each stage make room for so many pages."""

        def at(_: FarStage, talk: Talk) -> None:
            talk.request(m.Hold(pages), m.Held)

        self._send(at, lambda: None).result()

    @contextmanager
    def step(
        self,
        tokens: Tensor,
        spans: Sequence[FarSpan],  # noqa: ARG002  these layers come behind those that are here
        length: int,  # noqa: ARG002
        requests: Sequence[SamplingRequest],  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """See ``FarLayers``."""
        yield tokens

    def compute(
        self, states: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Future[SamplerOutput]:
        """See ``FarLayers``."""
        rows = _Rows(states)
        number = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            body = bytes_of(rows.states)
            wanted = tuple(requests) if stage is self._far[-1] else ()
            passed = talk.request(
                m.Compute(stage.due(number), tuple(spans), length, wanted, len(body)), m.Passed, body
            )
            if passed.nbytes:
                rows.states = tensor_of(talk.body(passed.nbytes), states.dtype, states.shape[1])
            rows.readings = passed.readings

        return self._send(at, lambda: rows.readings)

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
        parts: list[bytes] = []
        visit = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            parts.append(bytes(talk.body(talk.request(m.ReadPage(stage.due(visit), place), m.Page).nbytes)))

        return self._send(at, lambda: parts).result()

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """See ``FarLayers``."""
        visit = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            part = parts[stage.number - 1]
            talk.send(m.WritePage(stage.due(visit), place, len(part)), memoryview(part))

        self._send(at, lambda: None)

    def trouble(self) -> str:
        """Which stage is gone; empty if none is. From any thread."""
        ended = (gone(stage, "its connection has ended") for stage in self._far if stage.link.ended())
        return self._lost or next(ended, "")

    def close(self) -> None:
        """Ends all connections, with which the stages end."""
        self._lose(gone(self._far[0], "its connection was closed here"))

    def _later(self, errand: m.Errand) -> None:
        for stage in self._far:
            stage.errands.append((self._number + 1, errand))

    def _send(self, at: Callable[[FarStage, Talk], None], result: Callable[[], _R]) -> Future[_R]:
        """Sends a visit through all stages; its ``result`` once the last one has answered."""
        self._number += 1
        done: Future[_R] = Future()
        self._pass_on(0, _Visit(self._number, at, lambda: done.set_result(result()), done.set_exception))
        return done

    def _pass_on(self, place: int, visit: _Visit) -> None:
        """To the stage at ``place``, or to its end behind the last."""
        with self._sending:  # behind the loss of a stage nothing is put into a queue whose thread has ended
            if self._lost:
                visit.failed(PartLostError(self._lost))
            elif place < len(self._far):
                self._queues[place].put(visit)
            else:
                visit.arrived()

    # The thread of a stage.

    def _relay(self, place: int) -> None:
        stage, waiting = self._far[place], self._queues[place]
        while not self._lost:
            try:
                visit = waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                if why := loss_of_idle(stage, stage.link):
                    self._lose(why)
                continue
            try:
                visit.at(stage, Talk(stage, stage.link))
            except StepFailedError as error:
                visit.failed(error)
            except Exception as error:  # an answer may be on its way, which nobody would take for another's
                self._lose(str(error) if isinstance(error, PartLostError) else gone(stage, repr(error)))
                visit.failed(PartLostError(self._lost))
            else:
                self._pass_on(place + 1, visit)
        while not waiting.empty():
            waiting.get().failed(PartLostError(self._lost))

    def _lose(self, why: str) -> None:
        with self._sending:
            self._lost = self._lost or why
        for stage in self._far:
            stage.link.close()


def bytes_of(states: Tensor) -> memoryview:
    """The bytes of states, straight from their memory."""
    data: memoryview = states.contiguous().flatten().view(torch.uint8).numpy().data
    return data


def tensor_of(body: bytearray, dtype: torch.dtype, dim: int) -> Tensor:
    """States ``(rows, dim)`` of their bytes."""
    return torch.frombuffer(body, dtype=torch.uint8).view(dtype).view(-1, dim)


# Shares.


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
    """``phalanx_serve.engine.model_runner.FarLayers`` and ``Assembly`` of connected processes. Once one of them is gone, methods raise PartLostError."""

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

"""Proxies for the other processes of a divided model, in the process with its first layers or shares.

All connections end in the first process; stages do not know each other. States cross the network once per stage and
back, which is cheap beside the computation.

Stages: a *visit* is a unit of work that passes through the stages in order of sending. Each stage has a thread here,
so stages compute different texts at the same time. Operations on texts and pages wait for the next visit, in order.

Shares: the first process sends the rows of a step, and all processes compute their share of each layer at the same
time. Where full results are needed (``phalanx_serve.stages.shares``), each process sends its piece to the first,
which sends the gathered result to all.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
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
from phalanx_serve.stages.messages import StageLink, StepFailedError, Talk, loss_message, loss_of_idle
from phalanx_serve.stages.shares import Share, assemble, bytes_of, held_share, keeps_heads
from phalanx_serve.traffic.events import PartLostError, ServeError

# Stages.


_R = TypeVar("_R")
_LOOK_S = 1.0
"""Seconds between two liveness checks of an idle stage."""


@dataclass
class FarStage:
    """Proxy of one stage."""

    number: int
    """Stage number, from 1; the first stage is this process."""
    layers: range
    link: StageLink
    errands: deque[tuple[int, m.Errand]] = field(default_factory=deque)
    """Pending operations, each due at the visit of its number or the next one."""

    def due(self, visit: int) -> tuple[m.Errand, ...]:
        """Remove and return the KV operations that were queued for ``visit`` or earlier, in order."""
        due = []
        while self.errands and self.errands[0][0] <= visit:
            due.append(self.errands.popleft()[1])
        return tuple(due)

    def __str__(self) -> str:
        return f"stage {self.number} (layers {self.layers.start} to {self.layers.stop - 1}, {self.link.peer})"


@dataclass(frozen=True)
class _Visit:
    """A unit of work that passes through all stages."""

    number: int
    at: Callable[[FarStage, Talk], None]
    arrived: Callable[[], None]
    failed: Callable[[Exception], None]


@dataclass
class _Rows:
    """States of a step between stages, and the last stage's sampler output."""

    states: Tensor
    readings: SamplerOutput = ()


class _FarProcesses(ABC):
    """Other processes of the model: operations on keys and values that wait for the next exchange, and the first loss."""

    _far: Sequence[FarStage] | Sequence[FarShare]
    _lost: str

    def drop(self, piece: int) -> None:
        """Let each process drop a text's keys and values before its next work."""
        self._later(m.Drop(piece))

    def copy_in(self, piece: int, number: int, place: int) -> None:
        """Let each process copy the page at ``place`` into page ``number`` of a text before its next work."""
        self._later(m.CopyIn(piece, number, place))

    def copy_out(self, piece: int, number: int, place: int) -> None:
        """Let each process copy page ``number`` of a text to ``place`` before its next work."""
        self._later(m.CopyOut(piece, number, place))

    def trouble(self) -> str:
        """Return which process is lost; empty if none is. Any thread may call it."""
        ended = (loss_message(far, "its connection has ended") for far in self._far if far.link.ended())
        return self._lost or next(ended, "")

    def close(self) -> None:
        """Close all connections; the processes then end."""
        self._lose(loss_message(self._far[0], "its connection was closed here"))

    def _lose(self, reason: str) -> None:
        """Record the first loss, and close all links."""
        self._lost = self._lost or reason
        for far in self._far:
            far.link.close()

    @abstractmethod
    def _later(self, errand: m.Errand) -> None:
        """Let each process do an operation before its next work."""


class FarStages(_FarProcesses):
    """``phalanx_serve.engine.model_runner.FarLayers`` of connected stages. If one is lost, methods and futures
    raise PartLostError.
    """

    _far: list[FarStage]

    def __init__(self, stages: Sequence[FarStage], spec: ModelSpec, most_layers: int) -> None:
        """Describe each stage's part of a page, and start a thread for each stage.

        ``most_layers`` is the largest number of layers of ``spec`` in one process.
        """
        self._far, self.shares = list(stages), 1
        self.max_in_flight = len(stages) + 1
        self.kv_spec = replace(spec, layers=most_layers)
        heads = range(attention_kind(spec).cache_row(spec)[0])
        self.own = PageBox(range(stages[0].layers.start), heads)
        self.boxes: Sequence[PageBox] = [PageBox(stage.layers, heads) for stage in stages]
        self._number, self._lost, self._sending = 0, "", Lock()
        self._queues: list[queue.SimpleQueue[_Visit]] = [queue.SimpleQueue() for _ in stages]
        for place in range(len(stages)):
            Thread(target=self._relay, args=(place,), name=f"stage {place + 1}", daemon=True).start()

    def attach(self, model: Transformer, *, exact: bool) -> Affine | None:  # noqa: ARG002
        """Do nothing, and return None: layers of other processes do not change those of this one."""
        return None

    def hold(self, pages: int) -> None:
        """Allocate ``pages`` pages in each stage, and wait until all have. Raises PartLostError."""

        def at(_: FarStage, talk: Talk) -> None:
            talk.request(m.Hold(pages), m.PagesAllocated)

        self._send(at, lambda: None).result()

    @contextmanager
    def step(
        self,
        tokens: Tensor,
        spans: Sequence[FarSpan],  # noqa: ARG002  these layers come behind those that are here
        length: int,  # noqa: ARG002
        requests: Sequence[SamplingRequest],  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """Yield ``tokens``, which the first layers take."""
        yield tokens

    def compute(
        self, states: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Future[SamplerOutput]:
        """Send ``states`` of rows through all stages; return a future of the last one's sampled tokens.

        Each stage gets the KV operations that are due with it. The future raises PartLostError if one is lost,
        StepFailedError if one fails.
        """
        rows = _Rows(states)
        number = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            """Send a stage the states of the one before, and keep what it returns."""
            body = bytes_of(rows.states)
            sampled = tuple(requests) if stage is self._far[-1] else ()
            passed = talk.request(
                m.Compute(stage.due(number), tuple(spans), length, sampled, len(body)), m.Passed, body
            )
            if passed.nbytes:
                rows.states = tensor_of(talk.body(passed.nbytes), states.dtype, states.shape[1])
            rows.readings = passed.readings

        return self._send(at, lambda: rows.readings)

    def read(self, place: int) -> list[bytes]:
        """Return each stage's part of the page at ``place``, after all work before. Waits; raises PartLostError."""
        parts: list[bytes] = []
        visit = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            parts.append(bytes(talk.body(talk.request(m.ReadPage(stage.due(visit), place), m.Page).nbytes)))

        return self._send(at, lambda: parts).result()

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """Send each stage its part of the page at ``place``, without waiting; a failure is a loss that later calls raise."""
        visit = self._number + 1

        def at(stage: FarStage, talk: Talk) -> None:
            part = parts[stage.number - 1]
            talk.send(m.WritePage(stage.due(visit), place, len(part)), memoryview(part))

        self._send(at, lambda: None)

    def _later(self, errand: m.Errand) -> None:
        """Let each stage do an operation at its next visit."""
        for stage in self._far:
            stage.errands.append((self._number + 1, errand))

    def _send(self, at: Callable[[FarStage, Talk], None], result: Callable[[], _R]) -> Future[_R]:
        """Send a visit through all stages in order; return a future of ``result``, which is computed after the last stage."""
        self._number += 1
        future: Future[_R] = Future()
        self._pass_on(0, _Visit(self._number, at, lambda: future.set_result(result()), future.set_exception))
        return future

    def _pass_on(self, place: int, visit: _Visit) -> None:
        """Queue a visit for the stage at ``place``, or complete it after the last stage. Fails it if a stage has been lost."""
        with self._sending:  # after a loss, nothing may be queued for a thread that has ended
            if self._lost:
                visit.failed(PartLostError(self._lost))
            elif place < len(self._far):
                self._queues[place].put(visit)
            else:
                visit.arrived()

    # The thread of a stage.

    def _relay(self, place: int) -> None:
        """Pass visits to the stage at ``place``, one after the other, and on to the next stage. Runs in the stage's
        thread.

        Checks an idle stage now and then. A failed step fails its visit alone; any other error is a loss, after which
        all fail.
        """
        stage, waiting = self._far[place], self._queues[place]
        while not self._lost:
            try:
                visit = waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                if reason := loss_of_idle(stage, stage.link):
                    self._lose(reason)
                continue
            try:
                visit.at(stage, Talk(stage, stage.link))
            except StepFailedError as error:
                visit.failed(error)
            except Exception as error:  # a late answer must not be read as that of another request
                self._lose(
                    str(error) if isinstance(error, PartLostError) else loss_message(stage, repr(error))
                )
                visit.failed(PartLostError(self._lost))
            else:
                self._pass_on(place + 1, visit)
        while not waiting.empty():
            waiting.get().failed(PartLostError(self._lost))

    def _lose(self, reason: str) -> None:
        """Record the first loss, and close all links."""
        with self._sending:
            super()._lose(reason)


def tensor_of(body: bytearray, dtype: torch.dtype, dim: int) -> Tensor:
    """Return the states ``(rows, dim)`` in ``body``."""
    return torch.frombuffer(body, dtype=torch.uint8).view(dtype).view(-1, dim)


# Shares.


@dataclass
class FarShare:
    """Proxy of one share."""

    share: Share
    link: StageLink
    errands: list[m.Errand] = field(default_factory=list)

    @property
    def talk(self) -> Talk:
        """Request channel to the process."""
        return Talk(self, self.link)

    def due(self) -> tuple[m.Errand, ...]:
        """Return and clear the pending operations, which come before any other message."""
        due = tuple(self.errands)
        self.errands.clear()
        return due

    def __str__(self) -> str:
        return f"share {self.share.number} of {self.share.of} (of every layer, {self.link.peer})"


class FarShares(_FarProcesses):
    """``phalanx_serve.engine.model_runner.FarLayers`` and ``Assembly`` of connected shares. If one is lost,
    methods raise PartLostError.
    """

    _far: list[FarShare]
    max_in_flight = 1

    def __init__(self, shares: Sequence[FarShare], spec: ModelSpec) -> None:
        """Describe the shares' part of each page, and start a thread that checks that their processes live."""
        self._far, self.shares = list(shares), len(shares) + 1
        self.kv_spec = held_share(spec, self.shares)
        heads = attention_kind(spec).cache_row(spec)[0]
        # All keep the latents, which belong to no head.
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
        """Connect the layers of ``model`` with the other shares, and return the product of its output projection."""
        self._model = model
        return assemble(model, Share(0, self.shares), self, exact=exact)

    def hold(self, pages: int) -> None:
        """Allocate ``pages`` pages in each process. Waits until all have."""
        with self._all() as far:
            for share in far:
                share.talk.send(m.Hold(pages))
            for share in far:
                share.talk.receive(m.PagesAllocated)

    @contextmanager
    def step(
        self, tokens: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Iterator[Tensor]:
        """Embed ``tokens``, send the states to all processes and yield them: all compute the same rows within the
        block.

        Raises PartLostError, also if the block fails.
        """
        assert self._model is not None, "the engine attaches it first"
        states = self._model.embedded(tokens)
        body = bytes_of(states)
        with self._all() as far:
            for share in far:
                share.talk.send(
                    m.Compute(share.due(), tuple(spans), length, tuple(requests), len(body)), body
                )
            yield states

    def gather(self, piece: Tensor, dim: int = -1) -> Tensor:
        """Wait for the pieces of all other shares, concatenate them behind ``piece`` along ``dim``, send that to all, and return it."""
        gathered = self._gathered(piece, dim)
        body = bytes_of(gathered)
        for share in self._far:
            share.talk.send(m.Whole(len(body)), body)
        return gathered

    def scores(self, piece: Tensor) -> Tensor:
        """Return the pieces of all shares, concatenated along the last dimension; the others get nothing."""
        return self._gathered(piece, -1)

    def _gathered(self, piece: Tensor, dim: int) -> Tensor:
        """Return the pieces of all processes, concatenated along ``dim``."""
        pieces = [piece]
        for share in self._far:
            body = share.talk.body(share.talk.receive(m.SharePiece).nbytes)
            pieces.append(shaped(body, piece, dim))
        return torch.cat(pieces, dim)

    def compute(
        self,
        states: Tensor,  # noqa: ARG002
        spans: Sequence[FarSpan],  # noqa: ARG002
        length: int,  # noqa: ARG002
        requests: Sequence[SamplingRequest],  # noqa: ARG002
    ) -> Future[SamplerOutput]:
        """Raise AssertionError: no layers follow these."""
        raise AssertionError("the last layer is here")

    def read(self, place: int) -> list[bytes]:
        """Return each share's part of the page at ``place``. Raises PartLostError."""
        with self._all() as far:
            return [
                bytes(share.talk.body(share.talk.request(m.ReadPage(share.due(), place), m.Page).nbytes))
                for share in far
            ]

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """Send each share its part of the page at ``place``. Raises PartLostError."""
        with self._all() as far:
            for share, part in zip(far, parts, strict=True):
                share.talk.send(m.WritePage(share.due(), place, len(part)), memoryview(part))

    def _later(self, errand: m.Errand) -> None:
        """Let each share do an operation at the next exchange."""
        for share in self._far:
            share.errands.append(errand)

    @contextmanager
    def _all(self) -> Iterator[list[FarShare]]:
        """Yield all shares for an exchange, one exchange at a time.

        Any exception of the block becomes PartLostError: the state of the processes is unknown, and all count as lost.
        Later calls raise it at once.
        """
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
                    f"a step has failed in the first of the processes that share each layer, and the others cannot continue: {error!r}"
                )
                raise PartLostError(self._lost) from error

    def _look(self) -> None:
        """Check every ``_LOOK_S`` that all processes are alive, unless an exchange is running, until one is lost."""
        while not self._lost:
            time.sleep(_LOOK_S)
            if not self._talking.acquire(blocking=False):
                continue
            try:
                if reason := next(
                    (reason for share in self._far if (reason := loss_of_idle(share, share.link))), ""
                ):
                    self._lose(reason)
            finally:
                self._talking.release()


class NearShare:
    """``Assembly`` of a process other than the first, over its connection to the first."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def gather(self, piece: Tensor, dim: int = -1) -> Tensor:
        """Send this share's piece to the first process, and return those of all shares, concatenated along ``dim``.

        Raises ServeError if the first process aborts the step.
        """
        self.scores(piece)
        answer = self._link.receive(m.TO_STAGE)
        if not isinstance(answer, m.Whole):
            raise ServeError(f"a step was broken off by {type(answer).__name__}")
        return shaped(self._link.receive_body(answer.nbytes), piece, dim)

    def scores(self, piece: Tensor) -> Tensor:
        """Send this share's piece to the first process, and return it."""
        body = bytes_of(piece)
        self._link.send(m.SharePiece(len(body)), body)
        return piece


def shaped(body: bytearray, like: Tensor, dim: int) -> Tensor:
    """Return the tensor in ``body``, without a copy, with the dtype and shape of ``like`` except along ``dim``; empty for no bytes."""
    shape = list(like.shape)
    shape[dim] = 0
    if not body:
        return like.new_empty(shape)
    shape[dim] = -1
    return torch.frombuffer(body, dtype=torch.uint8).view(like.dtype).view(shape)

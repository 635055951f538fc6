"""Model runner: computes the rows of a step through the layers of one process, and samples behind the last layer.

One process may have all layers. If a model is divided into stages (``phalanx.serve.stages``), each process has a runner with the keys
and values of its own layers. A row passes the same products in the same order wherever the next layer is, so exact bits are the same. The
sampler output of a row is a few numbers, so that a distribution over the vocabulary is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.hardware.portable.layer_step import MOST_ROWS
from phalanx.model.layers.linear import Affine
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.fast_products import use_fast_products
from phalanx.serve.engine.few_rows import few_rows
from phalanx.serve.engine.sampler import SamplerOutput, SamplingRequest, sample_rows
from phalanx.serve.kv_cache.layer_cache import LayerKVCache, Rule, Span
from phalanx.serve.kv_cache.memory import PageBytes
from phalanx.serve.kv_cache.page_boxes import PageBox
from phalanx.train.step.loss import log_probabilities

_MOST_BESIDE_LIBRARY = 2
"""Rows up to which the kernel of few rows is faster than a library with bf16 instructions, which reads a matrix as fast and multiplies faster."""


@dataclass(frozen=True)
class FarSpan:
    """A ``Span`` as it is sent to other processes: by the number of its text."""

    piece: int
    begin: int
    end: int


class FarLayers(Protocol):
    """Layers of a model that other processes have.

    Calls on keys and values apply to the texts and pages of their layers, in the order of the calls.
    """

    kv_spec: ModelSpec
    """The model as the process with the most keys and values has it."""
    shares: int
    """Processes that each layer that is here is divided among."""
    max_in_flight: int
    """Steps that can be in flight at a time, each of other texts."""
    own: PageBox
    """The part of a page that this process has."""
    boxes: Sequence[PageBox]
    """The part of a page that each of the others has."""

    def hold(self, pages: int) -> None:
        """Allocate ``pages`` in each process, before any other call."""
        ...

    def attach(self, model: Transformer, *, exact: bool) -> Affine | None:
        """Let the layers of this process compute with the others; return the product of the output projection, None for that of the runner."""
        ...

    def step(
        self, tokens: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> AbstractContextManager[Tensor]:
        """Return a context with the input of the layers of this process: tokens ``(rows,)`` or states ``(rows, dim)``."""
        ...

    def compute(
        self, states: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Future[SamplerOutput]:
        """Compute rows ``(rows, dim)`` through the layers behind those of this process.

        The future raises PartLostError if a process no longer answers.
        """
        ...

    def drop(self, piece: int) -> None: ...

    def copy_in(self, piece: int, number: int, place: int) -> None: ...

    def copy_out(self, piece: int, number: int, place: int) -> None: ...

    def read(self, place: int) -> list[bytes]:
        """Return each other process's part of a page."""
        ...

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """Store each other process's part of a page."""
        ...


@dataclass(frozen=True)
class RunnerOutput:
    """Result of a step's rows behind the layers of a runner."""

    states: Tensor
    """``(rows, dim)``: after the last norm, or for the next stage."""
    sampler_output: SamplerOutput | None
    """None if the model has further stages."""


class ModelRunner:
    """Layers of a model. Exact numerics are those of PyTorch's operations, which have portable kernels then."""

    def __init__(self, model: Transformer, rule: Rule, projection: Affine | None = None) -> None:
        """``projection`` is the product of the output projection; by default PyTorch's, or with fast numerics one that is faster."""
        products = None if rule.exact else use_fast_products(model)
        self._model, self._rule, self._projection = model, rule, projection or products
        self._few = few_rows(model)
        has_library = next(model.parameters()).dtype == torch.bfloat16 and products is None
        self._most_few = MOST_ROWS if rule.exact or not has_library else _MOST_BESIDE_LIBRARY

    @torch.no_grad()
    def compute(
        self, x: Tensor, spans: Sequence[Span], length: int, requests: Sequence[SamplingRequest]
    ) -> RunnerOutput:
        """Compute tokens ``(rows,)`` or states ``(rows, dim)``, in the order of ``spans``, through the layers.

        ``length`` is that of ``Transformer``.
        """
        count, model = len(x), self._model
        positions = [p for span in spans for p in range(span.begin, span.end)]
        masks: dict[tuple[int, ...], Tensor] = {}
        cache = [LayerKVCache(layer, spans, self._rule, masks) for layer in range(model.spec.layers)]
        distributions: list[tuple[Tensor, Tensor]] = []

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            if requests:
                rows = torch.tensor([request.row for request in requests])
                states = hidden[0].index_select(0, brought(rows, hidden.device))
                distributions.append(
                    log_probabilities(states, weight, model.spec.logit_cap, self._projection)
                )
            return hidden

        if self._few is not None and count <= self._most_few:
            states = self._few(x, spans, self._rule, length)
            if model.norm is not None:
                states = model.norm(states)
                readout(states[None], model.projection())
        else:
            at = brought(torch.tensor(positions), x.device)
            states = model(x[None], readout, positions=at, length=length, cache=cache)[0]
        if model.norm is None:
            return RunnerOutput(states, None)
        return RunnerOutput(states, sample_rows(requests, *distributions[0]) if distributions else [])

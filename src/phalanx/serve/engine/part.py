"""The part of a model that a process has: it computes the rows of a step through its layers, and reads what the last of them says.

A whole model is the part of all layers. Where a model is divided into stages (``phalanx.serve.stages``), each process has such a part, with keys
and values of its own layers; a row goes through the same products in the same order wherever the next layer is, so its bits are the same. What is
read of a row is a few numbers, so that a distribution over the vocabulary never has to travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.hardware.kernels.rows.product import MOST_ROWS
from phalanx.hardware.local.device import brought
from phalanx.model.layers.linear import Affine, Linear
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.few_rows import FewRows, few_rows
from phalanx.serve.engine.pages.boxes import PageBox
from phalanx.serve.engine.pages.memory import PageBytes
from phalanx.serve.engine.readings import Ask, Readings, readings_of
from phalanx.serve.engine.rows import LayerRows, Rule, Span
from phalanx.serve.numerics.exact import Exact
from phalanx.serve.numerics.layers import ANY_CHAINS, attention_chains, keeps_bits
from phalanx.serve.numerics.products import fast_products, use_fast_products
from phalanx.train.step.loss import log_probabilities


@dataclass(frozen=True)
class FarSpan:
    """A ``Span`` as other processes know it: by the number of its piece."""

    piece: int
    begin: int
    end: int


class FarLayers(Protocol):
    """What other processes have of a model's layers.

    What is said of keys and values holds for the pieces and pages of their layers, in the order in which it is said.
    """

    held: ModelSpec
    """The description of what a process keeps keys and values of, that with most of them."""
    shares: int
    """Processes that each layer that is here is divided among."""
    flights: int
    """How many steps can be under way at a time, each of other texts."""
    own: PageBox
    """What this process has of a page's keys and values, """
    boxes: Sequence[PageBox]
    """and what each of the others has."""

    def hold(self, pages: int) -> None:
        """Has each process make room for so many pages, before anything else."""
        ...

    def attach(self, model: Transformer, exact: Exact | None) -> Affine | None:
        """Has the layers that are here compute with the others; the product of the output projection."""
        ...

    def step(
        self, tokens: Tensor, spans: Sequence[FarSpan], length: int, asks: Sequence[Ask]
    ) -> AbstractContextManager[Tensor]:
        """Within which this process takes what it gives through the layers that are here: tokens ``(rows,)`` or states ``(rows, dim)``."""
        ...

    def compute(
        self, states: Tensor, spans: Sequence[FarSpan], length: int, asks: Sequence[Ask]
    ) -> Future[Readings]:
        """Takes rows ``(rows, dim)`` through the layers behind those that are here. It raises PartLostError where a process does not answer
        any more."""
        ...

    def drop(self, piece: int) -> None: ...

    def copy_in(self, piece: int, number: int, place: int) -> None: ...

    def copy_out(self, piece: int, number: int, place: int) -> None: ...

    def read(self, place: int) -> list[bytes]:
        """What each of the others has of a page."""
        ...

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """Has each of the others keep its part of a page."""
        ...


@dataclass(frozen=True)
class Passed:
    """What a part makes of a step's rows."""

    states: Tensor
    """``(rows, dim)``: after the last norm, or for the next part."""
    readings: Readings | None
    """Where the part ends the model."""


class ModelPart:
    """Layers of a model, with whose products rows are independent if ``exact``."""

    def __init__(
        self, model: Transformer, rule: Rule, exact: Exact | None, projection: Affine | None = None
    ) -> None:
        """``projection`` is the product of the output projection; by default PyTorch's, or one that is faster."""
        products = use_fast_products(model) if exact is None else exact.products
        self._model, self._rule, self._exact, self._projection = model, rule, exact, projection or products
        self.few = few_rows_of(model, rule, exact)

    @torch.no_grad()
    def compute(self, x: Tensor, spans: Sequence[Span], length: int, asks: Sequence[Ask]) -> Passed:
        """Takes tokens ``(rows,)`` or states ``(rows, dim)``, those of ``spans`` in turn, through the layers; ``length`` as ``Transformer`` takes it."""
        count, model = len(x), self._model
        positions = [p for span in spans for p in range(span.begin, span.end)]
        masks: dict[tuple[int, ...], Tensor] = {}
        cache = [LayerRows(layer, spans, self._rule, masks) for layer in range(model.spec.layers)]
        found: list[tuple[Tensor, Tensor]] = []

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            if rows := self._padded([ask.row for ask in asks]):
                states = hidden[0].index_select(0, brought(torch.tensor(rows), hidden.device))
                found.append(log_probabilities(states, weight, model.spec.logit_cap, self._projection))
            return hidden

        rows = self._padded(list(range(count)))
        if self.few is not None and count <= MOST_ROWS:
            states = self.few(x, spans, self._rule, length)
            if model.norm is not None:
                states = model.norm(states[rows])
                readout(states[None], model.projection())
        else:
            x = x if len(rows) == count else x.index_select(0, brought(torch.tensor(rows), x.device))
            at = brought(torch.tensor(self._padded(positions)), x.device)
            states = model(x[None], readout, positions=at, length=length, cache=cache)[0]
        states = states[:count]
        if model.norm is None:
            return Passed(states, None)
        return Passed(states, readings_of(asks, *found[0]) if found else [])

    def _padded(self, values: list[int]) -> list[int]:
        """The values with the last one repeated, until rows so many keep their bits."""
        return values + values[-1:] * (self._exact.rows.padding(len(values)) if self._exact and values else 0)


def few_rows_of(model: Transformer, rule: Rule, exact: Exact | None) -> FewRows | None:
    """The way of few rows through ``model`` without its modules; exact numerics take what was tried alone."""
    few = few_rows(model, _whole if exact is None else exact.products.block)
    if few is None or (exact is not None and not keeps_bits(few)):
        return None
    chains = ANY_CHAINS if exact is None else attention_chains(few, rule.sequence)
    few.attention = few.attends(chains) if chains is not None else None
    return few


def _whole(linear: Linear) -> int:
    """A block for products whose order of additions is nobody's concern; 0 where other processes have a part of the product, or where a library computes
    bf16 rows faster."""
    products = fast_products(linear)
    if products is not None:
        return products.block(linear)
    inputs = 0 if linear.weight.dtype == torch.bfloat16 else linear.weight.shape[1]
    return inputs if linear.affine is None else 0

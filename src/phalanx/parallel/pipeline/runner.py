"""Runs the micro-batches of a step's slots through the stages of a pipeline.

Each rank holds one stage of the model or several (``Transformer.keep``) and works through its list of actions
(``phalanx.parallel.pipeline.schedules``); inputs and gradients of stages travel between the ranks
(``phalanx.parallel.pipeline.stage_links``). The interpreter is our own rather than that of ``torch.distributed.pipelining``, because that
one makes every rank's list on every rank, divides backward passes in a way that changes bits and cannot use this project's loss (see
``phalanx.parallel.pipeline.runner``), holds a sharded stage's weights gathered for the whole slot, and cuts batches and keyword
arguments into pieces by rules of its own.

Micro-batches of one slot follow those of the one before without a pause, if the schedule can do that. Forward passes of a slot
mingle with backward passes of the one before, but a stage computes gradients of one slot at a time: ``Accumulation`` is told of
which, and closes a slot's gradient after the stage's last backward pass for it, while the slot still flows through other stages.

A stage is called as the undivided model is: the caller's ``Forward`` says how, for each micro-batch. So all that a pipeline
changes is where the graph is cut, and the gradients have the bits of one rank that runs micro-batch after micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.dense import Linear
from phalanx.model.layers.experts.expert_groups import Groups, grouped_product
from phalanx.model.layers.experts.moe import Experts
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.pipeline.schedules import Action, Schedule, StageMessage, stages_of_rank
from phalanx.parallel.pipeline.stage_links import StageLinks
from phalanx.run.layout import SPLIT_BACKWARD

# Postponed weight gradients of a stage, so that a pipeline can pass on its input's gradient first.
#
# The zero-bubble schedules (arXiv 2401.10241) divide a backward pass in two: I, the gradient of the stage's input, for which
# the stage before is waiting, and W, those of the weights, for which nobody is. Nearly all weights are used in matrix products,
# and of these the layers allow the product to be exchanged (``Linear.product``, ``Experts.product``). The one put there
# computes the input's gradient in the backward pass and notes the two factors of the weight's; ``add`` multiplies them later.
# What is not such a product (norms, router, embedding, the loss) is small, and is computed with I.
#
# PyTorch's own way (``torch.distributed.pipelining``) runs the same graph twice, once for inputs and once for weights. That
# calls functions that allow it once, such as the chunked loss, a second time, computes checkpointed layers a third time, and
# adds bf16 gradients in bf16. Here every operation is that of an undivided backward pass, and so are the bits.


class WeightGradients:
    """The postponed weight gradients of one stage, by micro-batch."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        """The micro-batch that passes forward or back, if its weight gradients are to be put off; else ``None``."""
        self._put_off: dict[int, list[tuple[Tensor, Callable[[], Tensor | None]]]] = defaultdict(list)

    def note(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Remembers how a gradient of ``weight`` will be computed; ``None`` if it goes elsewhere."""
        assert self.micro_batch is not None, "this backward pass was to be undivided"
        self._put_off[self.micro_batch].append((weight, gradient))

    def add(self, micro_batch: int) -> None:
        """Computes the postponed gradients of ``micro_batch``, and adds them as a backward pass would, hooks included."""
        derived = []
        for weight, gradient in self._put_off.pop(micro_batch, ()):
            value = gradient()
            if value is None:
                continue
            if weight.is_leaf:
                torch.autograd.backward((weight,), (value,))
            else:
                derived.append((weight, value))
        if derived:  # what they derive from may be waiting for the gradients of all of them
            weights, gradients = zip(*derived, strict=True)
            torch.autograd.backward(weights, gradients)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of ``Linear``."""
        # Lanes of this rank with rows of their own cut them out of a parameter while the layer runs, and nothing marks it as derived:
        # computed again it sees the same. Their gradient goes to the parameter together with those of the other lanes' rows.
        if not self._puts_off(x) or not weight.is_leaf:
            return F.linear(x, weight)
        return apply_function(_LinearProduct, x, weight.detach(), (self, weight))

    def grouped(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """The product of ``Experts``."""
        if not self._puts_off(rows):
            return grouped_product(rows, matrices, groups)
        return apply_function(_GroupedProduct, rows, matrices.detach(), groups, (self, matrices))

    def _puts_off(self, x: Tensor) -> bool:
        return self.micro_batch is not None and torch.is_grad_enabled() and x.requires_grad


_Owner = tuple[WeightGradients, Tensor]
# In a tuple, autograd does not see the weight: an edge to it would have to deliver a gradient in the pass itself.


def put_off_weight_gradients(part: nn.Module) -> WeightGradients:
    """Lets the products of a stage postpone their weight gradients; those with a format of their own, biases or derived weights do not."""
    store = WeightGradients()
    for module in part.modules():
        if isinstance(module, Linear):
            # What derives from a weight is summed on its way to it, over ranks too: that should run once, with all that it sums.
            if module.product is None and module.bias is None and not module.weight_is_derived:
                module.product = store.linear
        elif isinstance(module, Experts) and module.product is None:
            module.product = store.grouped
    return store


class _DelayedContext(FunctionContext, Protocol):
    owner: _Owner


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _DelayedContext, x: Tensor, weight: Tensor, owner: _Owner) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: _DelayedContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        slope = upstream[0].reshape(-1, weight.shape[0])
        store, owner = ctx.owner
        store.note(owner, partial(_linear_gradient, slope, x.reshape(-1, weight.shape[1])))
        return slope.mm(weight).view_as(x), None, None


def _linear_gradient(slope: Tensor, rows: Tensor) -> Tensor:
    return slope.t().mm(rows)


class _GroupedContext(_DelayedContext, Protocol):
    groups: Groups


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GroupedContext, rows: Tensor, matrices: Tensor, groups: Groups, owner: _Owner
    ) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups, ctx.owner = groups, owner
        return groups.multiply(rows, matrices.transpose(1, 2))

    @staticmethod
    def backward(ctx: _GroupedContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        rows, matrices = ctx.saved_tensors
        slope = upstream[0].contiguous()
        store, owner = ctx.owner
        store.note(owner, partial(ctx.groups.gradient, slope, rows))
        return ctx.groups.multiply(slope, matrices), None, None, None


Forward = Callable[[nn.Module, Tensor, int], Tensor]
"""Calls a stage with its input (tokens ``(b, s)`` or hidden states ``(b, s, d)``) for the micro-batch of that number. Gives
hidden states, or of the last stage the loss, 0-dim."""


class MicroBatches(Protocol):
    """The tokens ``(b, s)``, int64, of micro-batches, all of one shape: slot after slot, as many of each."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Tensor: ...


class Accumulation(Protocol):
    """Gradient accumulation over the micro-batches of slots. Stages are numbered as on their rank, slots as they flow, from 0."""

    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> AbstractContextManager[None]:
        """Encloses each computation of gradients of a stage.

        Args:
            part: The stage.
            slot: The slot that they belong to.
            last: True if the slot's gradient is complete on this stage afterwards.
            postponed: True if postponed weight gradients are added, outside of any backward pass.
        """
        ...


class Pipeline:
    """One rank's stages, and the engine that runs micro-batches through them."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: Schedule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        hidden: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Connects the ranks of the pipeline: on all of them at once.

        Args:
            parts: This rank's stages, in the order of ``stages_of_rank``.
            schedule: Of the whole pipeline.
            groups: Two with the pipeline's ranks in order, for messages to higher and to lower ranks; the same on gloo.
            hidden: Tokens and width ``(s, d)`` of hidden states between stages, as this rank holds them.
            dtype: Their format.
            device: Where they live.
        """
        self.rank, self.schedule, self.parts = dist.get_rank(groups[0]), schedule, parts
        self.hidden, self.device = hidden, device
        self.clock = CommClock.of(device)
        """Time that this rank stood still because it had nothing to compute with."""
        self.links = StageLinks(schedule, groups, device, dtype, self.clock)
        stages = stages_of_rank(schedule.name, schedule.pipeline, self.rank, schedule.per_rank)
        self.part_of = {stage: part for part, stage in enumerate(stages)}
        divides = schedule.name in SPLIT_BACKWARD
        self.put_off = [put_off_weight_gradients(part) if divides else WeightGradients() for part in parts]

    def run(
        self,
        tokens: MicroBatches,
        forward: Forward,
        scales: Sequence[float],
        accumulation: Accumulation,
    ) -> Tensor:
        """Forward and backward of slots: the loss of each micro-batch, zero except on the rank with the last stage.

        The gradients of the losses times their slot's scale are added to the parameters', in the order of micro-batches.

        Args:
            tokens: Of each micro-batch.
            forward: Calls a stage.
            scales: What multiplies the losses of each slot.
            accumulation: Encloses what computes gradients.
        """
        passage = _Passage(self, tokens, forward, scales, accumulation)
        return passage.run(partial(self.schedule.actions, slots=len(scales)))

    def evaluate(self, tokens: MicroBatches, forward: Forward) -> Tensor:
        """The loss of each micro-batch ``(b, s)``, zero except on the rank with the last stage; no gradients."""
        with torch.no_grad():
            return _Passage(self, tokens, forward).run(self.schedule.forward_only)


@dataclass
class _Passage:
    """One set of micro-batches on its way through the stages of a rank."""

    pipeline: Pipeline
    tokens: MicroBatches
    forward: Forward
    scales: Sequence[float] = (1.0,)
    """By slot."""
    accumulation: Accumulation | None = None
    local: dict[StageMessage, Tensor] = field(default_factory=dict)
    """Messages from one stage of this rank to the next."""
    graphs: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = field(default_factory=dict)
    """By stage and micro-batch in flight: the input, and where backward begins. Not the output: it is sent."""
    divided: frozenset[tuple[int, int]] = frozenset()
    """The stages and micro-batches whose backward pass is divided."""

    def run(self, actions_of: Callable[[int, int], list[Action]]) -> Tensor:
        """Works through this rank's actions; ``actions_of(rank, micro_batches)`` gives any rank's."""
        pipeline, count = self.pipeline, len(self.tokens)
        actions = actions_of(pipeline.rank, count)
        # Micro-batches with an I postpone their weight gradients to a W; those with a B compute both at once.
        self.divided = frozenset(action[1:] for action in actions if action.kind == "I")
        self.losses = torch.zeros(count, device=pipeline.device)
        links, schedule = pipeline.links, pipeline.schedule
        # Receivers know what comes from whom, and in which order, since every rank can compute any rank's list.
        coming = {source: schedule.sent(actions_of(source, count), pipeline.rank) for source in links.sources}
        links.open(coming, (len(self.tokens[0]), *pipeline.hidden))
        for action in actions:
            self._perform(action)
        links.close()
        return self.losses

    def _perform(self, action: Action) -> None:
        kind, stage, micro_batch = action
        part = self.pipeline.part_of[stage]
        put_off = self.pipeline.put_off[part]
        put_off.micro_batch = micro_batch if (stage, micro_batch) in self.divided else None
        if kind == "F":
            self._forward(part, action)
            return
        # A slot's gradient is complete with its last micro-batch's B or W: W's come in the order of micro-batches.
        last = kind != "I" and (micro_batch + 1) % self._per_slot == 0
        assert self.accumulation is not None
        with self.accumulation.computing(
            part, micro_batch // self._per_slot, last=last, postponed=kind == "W"
        ):
            if kind == "W":
                put_off.add(micro_batch)
            else:
                self._backward(action)

    @property
    def _per_slot(self) -> int:
        return len(self.tokens) // len(self.scales)

    def _forward(self, part: int, action: Action) -> None:
        _, stage, micro_batch = action
        # tokens (b, s) into the first stage, hidden states (b, s, d) into the others
        x = self.tokens[micro_batch] if stage == 0 else self._receive(StageMessage("F", stage, micro_batch))
        if stage > 0 and torch.is_grad_enabled():
            x.requires_grad_()  # a leaf of this stage's graph: its gradient goes back to the stage before
        y = self.forward(self.pipeline.parts[part], x, micro_batch)
        if stage == self.pipeline.schedule.stages - 1:
            self.losses[micro_batch] = y.detach()
            y = y * self.scales[micro_batch // self._per_slot]
        else:
            self._send(action, y.detach())
        if torch.is_grad_enabled():
            self.graphs[stage, micro_batch] = x, get_gradient_edge(y)

    def _backward(self, action: Action) -> None:
        _, stage, micro_batch = action
        x, end = self.graphs.pop((stage, micro_batch))
        if stage == self.pipeline.schedule.stages - 1:
            # The loss itself: 0-dim, scaled in forward.
            slope = torch.ones((), device=self.pipeline.device)
        else:
            slope = self._receive(StageMessage("B", stage, micro_batch))
        torch.autograd.backward((end,), (slope,))
        if stage > 0:
            assert x.grad is not None
            self._send(action, x.grad)

    def _receive(self, message: StageMessage) -> Tensor:
        if message in self.local:
            return self.local.pop(message)
        neighbor = message.stage - 1 if message.kind == "F" else message.stage + 1
        return self.pipeline.links.receive(self.pipeline.schedule.rank_of(neighbor), message)

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = self.pipeline.schedule.result(action)
        assert message is not None
        target = self.pipeline.schedule.rank_of(message.stage)
        if target == self.pipeline.rank:
            self.local[message] = tensor
        else:
            self.pipeline.links.send(target, tensor)

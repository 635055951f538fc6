"""Runs the micro-batches of a step's slots through the stages of a pipeline.

Each rank has one or more stages of the model (``Transformer.keep``) and executes its list of actions
(``phalanx.parallel.pipeline_schedules``). Stage inputs and gradients are sent between ranks
by ``StageLinks``.

This replaces the runtime of ``torch.distributed.pipelining``, which computes every rank's list on every rank and splits backward
passes in a way that changes bits. That runtime also cannot use the chunked loss, keeps a sharded stage's weights gathered for the
full slot, and splits batches and keyword arguments by rules of its own.

Micro-batches of successive slots follow each other without a pause if the schedule supports it. Forward passes of a slot interleave
with backward passes of the previous one, but a stage computes gradients of one slot at a time. ``Accumulation`` gets the slot's
number and closes the slot's gradient after the stage's last backward pass for it, while other stages still work on the slot.

A stage is called like the undivided model: the caller's ``Forward`` defines how, for each micro-batch. A pipeline changes only
where the graph is cut, so the gradients have the bits of one rank that runs the micro-batches in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.hardware.local.device import CommClock
from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.dense import Linear
from phalanx.model.layers.expert_groups import Groups, grouped_product
from phalanx.model.layers.moe import Experts
from phalanx.parallel.pipeline_schedules import Action, Schedule, StageMessage
from phalanx.run.layout import SPLIT_BACKWARD

# Sends activations and their gradients between the ranks of a pipeline.
#
# Each direction between two ranks is a queue, with messages in the order in which the sender computes them. Schedules are data, so
# the receiver can derive that order. It posts receives for the next few messages ahead of time, so that they arrive while it
# computes. No message waits behind one of the opposite direction, which avoids the usual pipeline deadlock without a global order.
#
# So there are two process groups of the same ranks, one for each direction. NCCL gives each pair of ranks in a group its own
# communicator and stream, unless the group was bound to a device when it was made; these groups must not be.

_AHEAD = 2
"""Number of receives posted ahead: one to compute with next, and one in flight meanwhile."""


@dataclass
class _Inbox:
    """Receiving side of one link: the messages from one rank."""

    source: int
    group: dist.ProcessGroup
    coming: deque[StageMessage] = field(default_factory=deque)
    posted: deque[tuple[StageMessage, dist.Work, Tensor]] = field(default_factory=deque)
    arrived: dict[StageMessage, Tensor] = field(default_factory=dict)

    def post(self, empty: Tensor) -> None:
        """Post the receive of the next message, into ``empty``."""
        work = dist.irecv(empty, self.source, group=self.group)
        assert work is not None
        self.posted.append((self.coming.popleft(), work, empty))


class StageLinks:
    """Links of one rank of a pipeline. For one set of micro-batches at a time: ``open``, many messages, ``close``."""

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        dtype: torch.dtype,
        clock: CommClock,
    ) -> None:
        """Connect the ranks of the pipeline. A collective.

        Args:
            schedule: Defines the senders and receivers.
            groups: Two groups of the pipeline's ranks, in order: for messages to higher and to lower ranks. The same group on gloo.
            device: Device of the hidden states.
            dtype: Dtype of the hidden states.
            clock: Measures the time that this rank waits for messages.
        """
        self._device, self._dtype, self._clock = device, dtype, clock
        rank, ranks = dist.get_rank(groups[0]), dist.get_process_group_ranks(groups[0])
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, tuple[int, dist.ProcessGroup]] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._shape: tuple[int, ...] = ()
        hello = torch.zeros(1, device=device)
        # NCCL connects two ranks on their first message, and blocks both until then. So one is sent now, in an order that is the
        # same on all ranks. Disjoint pairs come first, so that they do not wait for each other along the pipeline.
        for source, target in sorted(schedule.links(), key=lambda link: (min(link) % 2, link)):
            group = groups[source > target]
            if rank == source:
                self._outboxes[target] = ranks[target], group
                dist.send(hello, ranks[target], group=group)
            elif rank == target:
                self._inboxes[source] = _Inbox(ranks[source], group)
                dist.recv(hello, ranks[source], group=group)

    def open(self, coming: Mapping[int, Iterable[StageMessage]], shape: tuple[int, ...]) -> None:
        """Expect the messages of each source rank, in the order of sending and all of ``shape``, and post the first
        receives. Call it before the first message.
        """
        self._shape = shape
        for source, messages in coming.items():
            inbox = self._inboxes[source]
            inbox.coming = deque(messages)
            for _ in range(min(_AHEAD, len(inbox.coming))):
                self._post(inbox)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that send messages to this one."""
        return tuple(self._inboxes)

    def receive(self, source: int, message: StageMessage) -> Tensor:
        """Wait for ``message`` from rank ``source`` and return it. Messages of that source that arrive before it are
        kept. Each arrival posts the next receive.
        """
        inbox = self._inboxes[source]
        while message not in inbox.arrived:
            arriving, work, tensor = inbox.posted.popleft()
            with self._clock.measure():
                work.wait()
            inbox.arrived[arriving] = tensor
            if inbox.coming:
                self._post(inbox)
        return inbox.arrived.pop(message)

    def send(self, target: int, tensor: Tensor) -> None:
        """Send ``tensor`` to pipeline rank ``target`` without waiting. It may not change until it is sent; a
        reference is kept until then.
        """
        rank, group = self._outboxes[target]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, rank, group=group)
        assert work is not None
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def close(self) -> None:
        """Wait until all messages are sent. Call it after the last message."""
        while self._sending:
            work, _ = self._sending.popleft()
            with self._clock.measure():
                work.wait()

    def _post(self, inbox: _Inbox) -> None:
        inbox.post(torch.empty(self._shape, dtype=self._dtype, device=self._device))


# Postponed weight gradients of a stage, so that a pipeline can send its input's gradient first.
#
# The zero-bubble schedules (arXiv 2401.10241) split a backward pass in two. I is the gradient of the stage's input, which the previous
# stage waits for. W are the gradients of the weights, which no rank waits for. Nearly all weights are used in matrix products, and the
# layers allow that product to be replaced (``Linear.product``, ``Experts.product``). The replacement computes the input's gradient
# in the backward pass and stores the two factors of the weight's gradient; ``add`` multiplies them later. Other gradients (norms,
# router, embedding, loss) are cheap and are computed with I.
#
# ``torch.distributed.pipelining`` runs the same graph twice, once for inputs and once for weights. That calls functions a second
# time that support one call only, such as the chunked loss. It computes checkpointed layers a third time and adds bf16 gradients in
# bf16. Here every operation is that of an undivided backward pass, and so are the bits.


class WeightGradients:
    """Postponed weight gradients of one stage, by micro-batch."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        """The current micro-batch, if its weight gradients are postponed; else ``None``."""
        self._postponed: dict[int, list[tuple[Tensor, Callable[[], Tensor | None]]]] = defaultdict(list)

    def note(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Store a function that computes a gradient of ``weight``; it returns ``None`` if the gradient is delivered elsewhere."""
        assert self.micro_batch is not None, "the weight gradients of this backward pass are not postponed"
        self._postponed[self.micro_batch].append((weight, gradient))

    def add(self, micro_batch: int) -> None:
        """Compute the postponed gradients of ``micro_batch``, and accumulate them as a backward pass would, with
        hooks.

        Their entries are removed; nothing happens if there are none.
        """
        derived = []
        for weight, gradient in self._postponed.pop(micro_batch, ()):
            value = gradient()
            if value is None:
                continue
            if weight.is_leaf:
                torch.autograd.backward((weight,), (value,))
            else:
                derived.append((weight, value))
        if derived:  # their source may need the gradients of all of them at once
            weights, gradients = zip(*derived, strict=True)
            torch.autograd.backward(weights, gradients)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x`` ``(..., inputs)`` times the transpose of ``weight``: ``(..., outputs)``. Its weight gradient
        is postponed if the present micro-batch postpones, and ``weight`` is a leaf.
        """
        # A lane's rows are cut out of a parameter while the layer runs, which no flag marks as derived. Their gradient is joined
        # with those of the other lanes' rows, so it is not postponed.
        if not self._postpones(x) or not weight.is_leaf:
            return F.linear(x, weight)
        return apply_function(_LinearProduct, x, weight.detach(), (self, weight))

    def grouped(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Product for ``Experts``: grouped rows ``(n, inputs)`` to ``(n, outputs)``."""
        if not self._postpones(rows):
            return grouped_product(rows, matrices, groups)
        return apply_function(_GroupedProduct, rows, matrices.detach(), groups, (self, matrices))

    def _postpones(self, x: Tensor) -> bool:
        return self.micro_batch is not None and torch.is_grad_enabled() and x.requires_grad


_Owner = tuple[WeightGradients, Tensor]
# Autograd does not track the weight inside a tuple. With an edge to it, the pass itself would have to deliver a gradient.


def postpone_weight_gradients(part: nn.Module) -> WeightGradients:
    """Make the products of a stage postpone their weight gradients, and return the store of these.

    Left out are linear layers with a custom product, a bias or derived weights, and experts with a custom product. The
    others get the store's product.
    """
    store = WeightGradients()
    for module in part.modules():
        if isinstance(module, Linear):
            # The gradient of a derived weight is summed on its way to the parameter, also over ranks. That must run once.
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
        """Return the input's gradient now, and note the weight's as a function to compute later."""
        x, weight = ctx.saved_tensors
        slope = upstream[0].reshape(-1, weight.shape[0])  # (tokens, outputs)
        store, owner = ctx.owner
        # (tokens, outputs), (tokens, inputs)
        store.note(owner, partial(_linear_gradient, slope, x.reshape(-1, weight.shape[1])))
        return slope.mm(weight).view_as(x), None, None


def _linear_gradient(slope: Tensor, rows: Tensor) -> Tensor:
    return slope.t().mm(rows)  # (outputs, inputs)


class _GroupedContext(_DelayedContext, Protocol):
    groups: Groups


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GroupedContext, rows: Tensor, matrices: Tensor, groups: Groups, owner: _Owner
    ) -> Tensor:
        """Return each group of ``rows`` times the transpose of its expert's matrix; save both for backward."""
        ctx.save_for_backward(rows, matrices)
        ctx.groups, ctx.owner = groups, owner
        return groups.multiply(rows, matrices.transpose(1, 2))  # (m, i) by (experts, i, o): (m, o)

    @staticmethod
    def backward(ctx: _GroupedContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the input's gradient now, and note the weights' as a function to compute later."""
        rows, matrices = ctx.saved_tensors
        slope = upstream[0].contiguous()
        store, owner = ctx.owner
        store.note(owner, partial(ctx.groups.gradient, slope, rows))
        return ctx.groups.multiply(slope, matrices), None, None, None


Forward = Callable[[nn.Module, Tensor, int], Tensor]
"""Call a stage for one micro-batch: ``(stage, input, number of the micro-batch)``.

The input is tokens ``(b, s)`` or hidden states ``(b, s, d)``. Returns hidden states, or the 0-dim loss from the last stage.
"""


class MicroBatches(Protocol):
    """Tokens ``(b, s)``, int64, of micro-batches of one shape: slot after slot, equally many for each."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Tensor: ...


class Accumulation(Protocol):
    """Gradient accumulation over the micro-batches of slots. Stages and slots are numbered from 0 on their rank."""

    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> AbstractContextManager[None]:
        """Return the context of a stage's gradient computation, which leads the gradient to the buffer of ``slot`` and, after the ``last``
        one of the slot, its reduction.

        Args:
            part: Index of the stage on this rank.
            slot: Index of the slot.
            last: True if this computation completes the slot's gradient on this stage.
            postponed: True if it adds postponed weight gradients, outside of any backward pass.
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
        """Connect the ranks of the pipeline. A collective.

        Args:
            parts: This rank's stages, in the order of ``Schedule.stages_of``.
            schedule: Schedule of the full pipeline.
            groups: Two groups of the pipeline's ranks, in order: for messages to higher and to lower ranks. The same group on gloo.
            hidden: Tokens and width ``(s, d)`` of this rank's hidden states between stages.
            dtype: Dtype of the hidden states.
            device: Device of the hidden states.
        """
        self.rank, self.schedule, self.parts = dist.get_rank(groups[0]), schedule, parts
        self.hidden, self.device = hidden, device
        self.clock = CommClock.of(device)
        """Time that this rank waited for messages of other stages."""
        self.links = StageLinks(schedule, groups, device, dtype, self.clock)
        self.part_of = {stage: part for part, stage in enumerate(schedule.stages_of(self.rank))}
        splits_backward = schedule.name in SPLIT_BACKWARD
        self.postponed = [
            postpone_weight_gradients(part) if splits_backward else WeightGradients() for part in parts
        ]

    def run(
        self,
        tokens: MicroBatches,
        forward: Forward,
        scales: Sequence[float],
        accumulation: Accumulation,
    ) -> Tensor:
        """Run forward and backward of slots. Return the loss of each micro-batch ``(micro-batches,)``, zero except on the last stage.

        Gradients of the losses, times their slot's scale, are added to those of the parameters in the order of micro-batches.

        Args:
            tokens: Tokens of each micro-batch.
            forward: Calls a stage.
            scales: Factor on the losses of each slot.
            accumulation: Provides the context of gradient computations.
        """
        passage = _Passage(self, tokens, forward, scales, accumulation)
        return passage.run(partial(self.schedule.actions, slots=len(scales)))

    def evaluate(self, tokens: MicroBatches, forward: Forward, shape: tuple[int, ...] = ()) -> Tensor:
        """Return the last stage's result, of ``shape``, for each micro-batch ``(b, s)``: ``(micro-batches, *shape)``, fp32.

        It is the loss by default, and zero except on the rank with the last stage; no gradients.
        """
        with torch.no_grad():
            return _Passage(self, tokens, forward, shape=shape).run(self.schedule.forward_only)


@dataclass
class _Passage:
    """One run of a set of micro-batches through the stages of a rank."""

    pipeline: Pipeline
    tokens: MicroBatches
    forward: Forward
    scales: Sequence[float] = (1.0,)
    """Loss factors by slot."""
    accumulation: Accumulation | None = None
    shape: tuple[int, ...] = ()
    """The shape of the last stage's result: 0-dim for a loss."""
    local: dict[StageMessage, Tensor] = field(default_factory=dict)
    """Messages between two stages of this rank."""
    graphs: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = field(default_factory=dict)
    """For each stage and micro-batch in flight: the input, and the edge where backward begins. The output is sent, not kept."""
    divided: frozenset[tuple[int, int]] = frozenset()
    """Stages and micro-batches whose backward pass is split into I and W."""

    def run(self, actions_of: Callable[[int, int], list[Action]]) -> Tensor:
        """Execute this rank's actions and return the last stage's results ``(micro-batches, *shape)``, fp32, such as
        losses; zeros on ranks without that stage.

        A collective of the pipeline; ``actions_of(rank, micro_batches)`` returns the actions of any rank.
        """
        pipeline, count = self.pipeline, len(self.tokens)
        actions = actions_of(pipeline.rank, count)
        # Micro-batches with an I postpone their weight gradients to a W; those with a B compute both at once.
        self.divided = frozenset(action[1:] for action in actions if action.kind == "I")
        self.losses = torch.zeros(count, *self.shape, device=pipeline.device)
        links, schedule = pipeline.links, pipeline.schedule
        # Every rank can compute any rank's list, so receivers expect each sender's messages in their order.
        coming = {
            source: schedule.messages_to(actions_of(source, count), pipeline.rank) for source in links.sources
        }
        links.open(coming, (len(self.tokens[0]), *pipeline.hidden))
        for action in actions:
            self._perform(action)
        links.close()
        return self.losses

    def _perform(self, action: Action) -> None:
        """Execute one action: a forward pass, a backward pass (in full, or of inputs only), or postponed weight
        gradients, the latter two within the accumulation's context.
        """
        kind, stage, micro_batch = action
        part = self.pipeline.part_of[stage]
        postponed = self.pipeline.postponed[part]
        postponed.micro_batch = micro_batch if (stage, micro_batch) in self.divided else None
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
                postponed.add(micro_batch)
            else:
                self._backward(action)

    @property
    def _per_slot(self) -> int:
        return len(self.tokens) // len(self.scales)

    def _forward(self, part: int, action: Action) -> None:
        """Run a stage on the first input or a received one, and send the result to the next stage. The last stage
        stores the loss instead, and scales it by its slot's factor for backward.

        With gradients enabled, keep the input and the graph's edge for backward.
        """
        _, stage, micro_batch = action
        # Input: tokens (b, s) for the first stage, hidden states (b, s, d) for the others.
        x = self.tokens[micro_batch] if stage == 0 else self._receive(StageMessage("F", stage, micro_batch))
        if stage > 0 and torch.is_grad_enabled():
            x.requires_grad_()  # a leaf of this stage's graph; its gradient is sent to the previous stage
        y = self.forward(self.pipeline.parts[part], x, micro_batch)
        if stage == self.pipeline.schedule.stages - 1:
            self.losses[micro_batch] = y.detach()
            y = y * self.scales[micro_batch // self._per_slot]
        else:
            self._send(action, y.detach())
        if torch.is_grad_enabled():
            self.graphs[stage, micro_batch] = x, get_gradient_edge(y)

    def _backward(self, action: Action) -> None:
        """Run a stage's backward pass from the received gradient, or from the loss, and send the input's gradient;
        frees the graph.
        """
        _, stage, micro_batch = action
        x, output_edge = self.graphs.pop((stage, micro_batch))
        if stage == self.pipeline.schedule.stages - 1:
            # The gradient of the 0-dim loss, which forward has scaled.
            slope = torch.ones((), device=self.pipeline.device)
        else:
            slope = self._receive(StageMessage("B", stage, micro_batch))
        torch.autograd.backward((output_edge,), (slope,))
        if stage > 0:
            assert x.grad is not None
            self._send(action, x.grad)

    def _receive(self, message: StageMessage) -> Tensor:
        """Return ``message`` if a stage of this rank produced it, and forget it; else wait for it from the neighboring stage's rank."""
        if message in self.local:
            return self.local.pop(message)
        neighbor = message.stage - 1 if message.kind == "F" else message.stage + 1
        return self.pipeline.links.receive(self.pipeline.schedule.rank_of(neighbor), message)

    def _send(self, action: Action, tensor: Tensor) -> None:
        """Send an action's result to the stage that needs it, or keep it if that is on this rank."""
        message = self.pipeline.schedule.result(action)
        assert message is not None
        target = self.pipeline.schedule.rank_of(message.stage)
        if target == self.pipeline.rank:
            self.local[message] = tensor
        else:
            self.pipeline.links.send(target, tensor)

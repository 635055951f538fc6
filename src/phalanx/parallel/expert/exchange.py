"""Expert all-to-all: sends copies of tokens to the ranks that hold their experts, and the results back.

Expert parallelism (GShard, arXiv 2006.16668, section 3) without capacity: nothing is dropped and nothing padded, as in
MegaBlocks (arXiv 2211.15841). Each rank sorts the copies of its tokens by expert, and so by the rank that holds the expert.
The ranks tell each other how many copies are coming, then an all-to-all with uneven pieces sends exactly those. Results come
back by the transposed all-to-all; they are weighted and added where the token is at home, in fp32.

On a GPU the sizes of the pieces are needed on the host, so it waits for the device once per layer and forward pass (when
activations are computed again, once more). Backward has the sizes already and does not wait.

The ranks may belong to a team that computes several slots at once (``phalanx.run.layout``). What is computed for a slot must
not depend on the others: the rows of one expert and one slot are a *group* (``phalanx.model.layers.experts.expert_groups``), in the order of
source rank, then token. The rows of a hand are put in the order of expert, slot, position by one permutation, and go through the
experts as one set of grouped products, so on a GPU the number of launches does not grow with the team.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.experts.expert_groups import groups_of_slots
from phalanx.model.layers.experts.moe import (
    Exchange,
    Experts,
    combine,
    copies_by_expert,
    order_by_expert,
    permute,
)
from phalanx.model.layers.experts.router import Routing
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.tensor.sequence_comm import SequenceComm


@dataclass(frozen=True)
class Route:
    """The split sizes of an all-to-all: how many rows the ranks send each other."""

    sent: list[int]
    """To each rank."""
    received: list[int]
    """From each rank."""
    counts: Tensor
    """From each rank for each expert here, ``(ranks, experts here)``, int64."""
    of_experts: list[int]
    """For each expert here, from all ranks."""

    @property
    def back(self) -> Route:
        """The route of the results, which go back."""
        return replace(self, sent=self.received, received=self.sent)


@dataclass(frozen=True)
class ExpertExchange:
    """Dispatch and combine over ranks that hold different experts: rank ``i`` of ``group`` holds the ``i``-th run of them."""

    group: dist.ProcessGroup
    slots: int
    """Number of slots that the ranks' tokens belong to; the ranks of one slot are neighbors."""
    clock: CommClock
    apart: bool = True
    """True if each group's rows are a product of their own (``Groups.apart``)."""

    @uncompiled  # sizes are known only as it runs
    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Dispatches this rank's ``tokens`` ``(n, d)`` to their experts and combines the results: ``(n, d)``. A collective."""
        ranks = self.group.size()
        # Dispatch: copies of tokens (sent, d), sorted by expert, to the experts' ranks: (received, d). Combine: the way back.
        order = order_by_expert(routing.experts, ranks * len(experts.up))
        route = self._route(order.counts.view(ranks, -1))
        copies = _exchange(copies_by_expert(tokens, order), route, self)
        results = _exchange(self._through(copies, route, experts), route.back, self)
        return combine(results, order, routing.weights)

    def _route(self, sending: Tensor) -> Route:
        coming = torch.empty_like(sending)
        with self.clock.measure():
            dist.all_to_all_single(coming, sending, group=self.group)
        ranks, sums = len(sending), torch.cat((sending.sum(1), coming.sum(1), coming.sum(0))).tolist()
        return Route(sums[:ranks], sums[ranks : 2 * ranks], coming, sums[2 * ranks :])

    def _through(self, copies: Tensor, route: Route, experts: Experts) -> Tensor:
        """The results of ``copies`` ``(m, d)``, in their order: by rank, then expert, then token."""
        # Received rows lie by source rank, then expert; a slot's sources are neighbors. So the order by expert, then source
        # is also that by expert, then slot.
        taken, places = by_expert(route.counts, len(copies))
        counts = route.counts.view(self.slots, -1, route.counts.shape[1]).sum(1).t()  # (experts, slots)
        groups = groups_of_slots(counts.contiguous(), route.of_experts, apart=self.apart)
        return permute(experts(permute(copies, taken, places), groups), places, taken)


@dataclass(frozen=True)
class DividedExperts:
    """Experts whose matrices are divided over the tensor ranks, each of which has a piece of the sequence.

    All of these ranks need the tokens of all: they are gathered with their routing, whose gradient therefore comes back to
    the rank that routed them, and the ranks' partial results are summed.
    """

    comm: SequenceComm
    inner: Exchange

    @uncompiled
    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """This rank's ``tokens`` ``(n, d)`` through their experts: ``(n, d)``. A collective of the tensor ranks."""
        all_tokens, weights = self._gather(tokens), self._gather(routing.weights)
        chosen = self.comm.stack(routing.experts).flatten(0, 1)
        partial = self.inner(all_tokens, Routing(chosen, weights), experts)
        return self.comm.sum_scatter(partial.unsqueeze(0)).squeeze(0)

    def _gather(self, rows: Tensor) -> Tensor:
        return self.comm.gather(rows.unsqueeze(0)).squeeze(0)


def by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation that puts rows into the order of expert, then source, and its inverse: ``(rows,)``, int64.

    Args:
        counts: ``(sources, experts)``, int64: how many rows each source has for each expert. They lie in the order of
            source, then expert.
        rows: Their sum, known already; asking the device for it would mean to wait.
    """
    return _moved(counts, rows), _moved(counts.t(), rows)


def _moved(sizes: Tensor, rows: int) -> Tensor:
    """Where the rows come from when blocks of ``sizes`` ``(a, b)``, which lie by ``a``, then ``b``, are put by ``b``, ``a``."""
    begin_before = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    moved = sizes.t().flatten()
    begin_after = moved.cumsum(0) - moved
    shift = torch.repeat_interleave(begin_before - begin_after, moved, output_size=rows)
    return torch.arange(rows, device=sizes.device) + shift


class _ExchangeContext(FunctionContext, Protocol):
    back: Route
    exchange: ExpertExchange


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, rows: Tensor, route: Route, exchange: ExpertExchange) -> Tensor:
        ctx.back, ctx.exchange = route.back, exchange
        return _sent(rows, route, exchange)

    @staticmethod
    def backward(ctx: _ExchangeContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return _sent(upstream[0], ctx.back, ctx.exchange), None, None


def _exchange(rows: Tensor, route: Route, exchange: ExpertExchange) -> Tensor:
    """All-to-all of everybody's ``rows`` ``(sent, d)``: those sent here, ``(received, d)``; both in the order of ranks."""
    return apply_function(_Exchange, rows, route, exchange)


def _sent(rows: Tensor, route: Route, exchange: ExpertExchange) -> Tensor:
    received = rows.new_empty((sum(route.received), rows.shape[1]))
    with exchange.clock.measure():
        dist.all_to_all_single(received, rows.contiguous(), route.received, route.sent, group=exchange.group)
    return received

"""Expert all-to-all: sends copies of tokens to the ranks that hold their experts, and the results back.

Expert parallelism (GShard, arXiv 2006.16668, section 3) without capacity: nothing is dropped and nothing padded, as in
MegaBlocks (arXiv 2211.15841). Each rank sorts the copies of its tokens by expert, and so by the rank that holds the expert.
The ranks tell each other how many copies are coming, then an all-to-all with uneven pieces sends exactly those. Results come
back by the transposed all-to-all; they are weighted and added where the token is at home, in fp32.

On a GPU the sizes of the pieces are needed on the host, so it waits for the device once per layer and forward pass (when
activations are computed again, once more). Backward has the sizes already and does not wait.

The ranks may belong to a team that computes several slots at once (``phalanx.run.layout``). What is computed for a slot must
not depend on the others, so their copies are never mixed: each slot's are put into memory of their own, in the order of expert,
then source rank, then token, and the experts work on the slots one by one, adding their weight gradients in the order of the
slots' tree. So a slot's bits are a function of the slot and of the run's degrees.

Teams of different sizes agree to the bit too, in fp32, with one micro-batch to a slot, and where kernels compute a row alike
wherever it lies (a CPU's SiLU does if the inner width fills whole vector registers). Otherwise the sums are the same but for
rounding: several micro-batches are added after the slots of each, and bf16 rounds at each node of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.moe import Exchange, Experts, combine, copies_by_expert, order_by_expert, permute
from phalanx.model.layers.router import Routing
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

    @property
    def back(self) -> Route:
        """The route of the results, which go back."""
        return Route(self.received, self.sent, self.counts)


@dataclass(frozen=True)
class ExpertExchange:
    """Dispatch and combine over ranks that hold different experts: rank ``i`` of ``group`` holds the ``i``-th run of them."""

    group: dist.ProcessGroup
    slots: int
    """Number of slots that the ranks' tokens belong to; the ranks of one slot are neighbors."""
    clock: CommClock

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
        sent, received = torch.stack((sending.sum(1), coming.sum(1))).tolist()
        return Route(sent, received, coming)

    def _through(self, copies: Tensor, route: Route, experts: Experts) -> Tensor:
        """The results of ``copies`` ``(m, d)``, in their order: by rank, then expert, then token."""
        # Received rows lie by source rank, then expert; each slot's sources are neighbors. A slot's rows are permuted to the
        # order of expert, then source, go through the experts, and are permuted back.
        sources = self.group.size() // self.slots
        sizes = [sum(route.received[at : at + sources]) for at in range(0, self.group.size(), sources)]
        counts = route.counts.view(self.slots, sources, -1)
        orders = [by_expert(table, size) for table, size in zip(counts, sizes, strict=True)]
        rows = zip(torch.split(copies, sizes), orders, strict=True)
        results = experts(
            [
                (permute(part, taken, places), table.sum(0))
                for (part, (taken, places)), table in zip(rows, counts, strict=True)
            ]
        )
        pairs = zip(results, orders, strict=True)
        return torch.cat([permute(part, places, taken) for part, (taken, places) in pairs])


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

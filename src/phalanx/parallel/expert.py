"""The expert axis: the routed experts of each layer dealt over a few ranks, and the all-to-all that brings tokens to them.

A layer's experts lie on ``layout.expert`` ranks, folded over the inner axes of the mesh (``phalanx.run.layout``): the ranks
along tensor and context, which share a slot's tokens anyhow, and as many neighboring data-parallel ranks as are needed
beyond these. Each holds the same number of experts, whole, or with ``layout.expert_tensor`` some of their inner elements.
The tokens travel by all-to-all. Routers and shared experts are not dealt; the tensor axis cares for
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.hardware.local.device import on_gpu
from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.experts.expert_groups import groups_of_slots
from phalanx.model.layers.experts.moe import (
    Exchange,
    Experts,
    LocalExchange,
    MoE,
    combine,
    copies_by_expert,
    order_by_expert,
    permute,
)
from phalanx.model.layers.experts.router import Routing
from phalanx.model.transformer import Transformer
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import DimSplit, Mesh, Partition
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.spec import RunSpec

_DIVIDED = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dimension that ranks divide: that of an expert's inner elements. Of ``down_bias`` each adds a part to its share of the sum."""


def apply_experts(
    module: Transformer,
    mesh: Mesh,
    spec: RunSpec,  # noqa: ARG001  all axes are applied by the same call
    clock: CommClock,
) -> dict[str, Partition]:
    """Deals the experts of ``module``, on the meta device and not yet sharded, over the expert axes of ``mesh``.

    Afterwards their parameters are this rank's parts, and each mixture takes the tokens that this rank has, whatever the
    other axes made of them.

    Returns:
        Where the part of each of the experts' parameters lies, also if it is the whole.
    """
    exchange = _exchange(mesh, clock)
    partitions = {}
    for name, part in module.named_modules():
        if isinstance(part, MoE):
            part.exchange = exchange
            partitions.update(_cut(part.experts, f"{name}.experts", mesh))
    return partitions


def _exchange(mesh: Mesh, clock: CommClock) -> Exchange:
    layout = mesh.layout
    dealt: Exchange = LocalExchange()
    if layout.expert > 1:
        dealt = ExpertExchange(mesh.expert_group, layout.team, clock, apart=not on_gpu(mesh.device))
    if layout.expert_tensor == 1:
        return dealt
    return DividedExperts(SequenceComm(mesh.expert_tensor_group, clock), dealt)


def _cut(experts: Experts, prefix: str, mesh: Mesh) -> dict[str, Partition]:
    """Replaces the parameters of ``experts`` by this rank's parts."""
    partitions = {}
    for name, whole in list(experts.named_parameters()):
        partition = Partition(tuple(whole.shape), tuple(_splits(_DIVIDED[name], mesh)))
        setattr(experts, name, nn.Parameter(whole.new_empty(partition.part[1]), whole.requires_grad))
        partitions[f"{prefix}.{name}"] = partition
        if name == "down_bias":
            experts.result_start = partition.part[0][1]
    return partitions


def _splits(inner: int, mesh: Mesh) -> Iterator[DimSplit]:
    layout = mesh.layout
    if layout.expert > 1:
        yield DimSplit(0, mesh.expert_rank, layout.expert, mesh.expert_group)
    if layout.expert_tensor > 1:
        index = mesh.expert_mesh.get_local_rank("expert_tensor")
        yield DimSplit(inner, index, layout.expert_tensor, mesh.expert_tensor_group)


# The expert all-to-all: sends copies of tokens to the ranks of their experts, and the results back.
#
# Expert parallelism (GShard, arXiv 2006.16668, section 3) without capacity: nothing is dropped and nothing padded, as in
# MegaBlocks (arXiv 2211.15841). Each rank sorts the copies of its tokens by expert, and so by the rank that holds the expert.
# The ranks tell each other how many copies are coming, then an all-to-all with uneven pieces sends exactly those. Results come
# back by the transposed all-to-all; they are weighted and added where the token is at home, in fp32.
#
# On a GPU the sizes of the pieces are needed on the host, so it waits for the device once per layer and forward pass (when
# activations are computed again, once more). Backward has the sizes already and does not wait.
#
# The ranks may belong to a team that computes several slots at once (``phalanx.run.layout``). What is computed for a slot must
# not depend on the others: the rows of one expert and one slot are a *group* (``phalanx.model.layers.experts.expert_groups``), in the order of
# source rank, then token. The rows of a hand are put in the order of expert, slot, position by one permutation, and go through the
# experts as one set of grouped products, so on a GPU the number of launches does not grow with the team.


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
        copies = _exchanged(copies_by_expert(tokens, order), route, self)
        results = _exchanged(self._through(copies, route, experts), route.back, self)
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


def _exchanged(rows: Tensor, route: Route, exchange: ExpertExchange) -> Tensor:
    """All-to-all of everybody's ``rows`` ``(sent, d)``: those sent here, ``(received, d)``; both in the order of ranks."""
    return apply_function(_Exchange, rows, route, exchange)


def _sent(rows: Tensor, route: Route, exchange: ExpertExchange) -> Tensor:
    received = rows.new_empty((sum(route.received), rows.shape[1]))
    with exchange.clock.measure():
        dist.all_to_all_single(received, rows.contiguous(), route.received, route.sent, group=exchange.group)
    return received

"""The expert axis: the routed experts of each layer are distributed over ranks, and tokens reach them by all-to-all.

A layer's experts are on ``layout.expert`` ranks, folded over the inner axes of the mesh (``phalanx.run.layout``). These are the
tensor and context ranks, which share a slot's tokens already, and as many neighboring data-parallel ranks as are needed. Each rank
has the same number of experts, complete, or with ``layout.expert_tensor`` some of their inner elements. Routers and shared experts
are not distributed; the tensor axis handles them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.hardware.local.device import CommClock, on_gpu
from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers import moe
from phalanx.model.layers.expert_groups import groups_of_slots
from phalanx.model.transformer import Transformer
from phalanx.parallel.mesh import DimSplit, Mesh, Partition
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.spec import RunSpec

_DIVIDED = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dimension that expert-tensor ranks divide: an expert's inner elements. Each rank adds a part of ``down_bias`` to its partial sum.
"""


def apply_experts(
    module: Transformer,
    mesh: Mesh,
    spec: RunSpec,  # noqa: ARG001  all axes are applied by the same call
    clock: CommClock,
) -> dict[str, Partition]:
    """Distribute the experts of ``module`` over the expert axes of ``mesh``. The module is on the meta device and not
    yet sharded.

    Afterwards the experts' parameters are this rank's parts, uninitialized, and each mixture has its exchange. Each
    mixture takes the tokens of this rank, as the other axes have divided them.

    Returns:
        The partition of each expert parameter, by name; also of those that are complete on this rank.
    """
    exchange = _exchange(mesh, clock)
    partitions = {}
    for name, part in module.named_modules():
        if isinstance(part, moe.MoE):
            part.exchange = exchange
            partitions.update(_cut(part.experts, f"{name}.experts", mesh))
    return partitions


def _exchange(mesh: Mesh, clock: CommClock) -> moe.Exchange:
    """Return the exchange between experts of the mesh's layout: local, over expert ranks, over divided experts, or both."""
    layout = mesh.layout
    exchange: moe.Exchange = moe.LocalExchange()
    if layout.expert > 1:
        exchange = ExpertExchange(mesh.expert_group, layout.team, clock, apart=not on_gpu(mesh.device))
    if layout.expert_tensor == 1:
        return exchange
    return DividedExperts(SequenceComm(mesh.expert_tensor_group, clock), exchange)


def _cut(experts: moe.Experts, prefix: str, mesh: Mesh) -> dict[str, Partition]:
    """Replace the parameters of ``experts`` by this rank's parts, uninitialized.

    Return the partitions by name. Biases of down projections also set where this rank's part of the result begins.
    """
    partitions = {}
    for name, full_param in list(experts.named_parameters()):
        partition = Partition(tuple(full_param.shape), tuple(_splits(_DIVIDED[name], mesh)))
        setattr(
            experts, name, nn.Parameter(full_param.new_empty(partition.part[1]), full_param.requires_grad)
        )
        partitions[f"{prefix}.{name}"] = partition
        if name == "down_bias":
            experts.result_start = partition.part[0][1]
    return partitions


def _splits(inner: int, mesh: Mesh) -> Iterator[DimSplit]:
    """Yield how an expert parameter is divided: dimension 0 over expert ranks, ``inner`` over expert-tensor ranks."""
    layout = mesh.layout
    if layout.expert > 1:
        yield DimSplit(0, mesh.expert_rank, layout.expert, mesh.expert_group)
    if layout.expert_tensor > 1:
        index = mesh.expert_mesh.get_local_rank("expert_tensor")
        yield DimSplit(inner, index, layout.expert_tensor, mesh.expert_tensor_group)


# The expert all-to-all: dispatches copies of tokens to the ranks of their experts, and returns the results.
#
# Expert parallelism (GShard, arXiv 2006.16668, section 3) without capacity: no token is dropped or padded, as in MegaBlocks
# (arXiv 2211.15841).
#
# 1. Each rank sorts the copies of its tokens by expert, and so by the rank that has the expert.
# 2. The ranks exchange the numbers of copies.
# 3. An all-to-all with uneven splits sends the copies.
# 4. The transposed all-to-all returns the results. They are weighted and added on the token's rank, in fp32.
#
# On a GPU the host needs the split sizes, so it waits for the device once per layer and forward pass, and once more if activations
# are recomputed. Backward reuses the sizes and does not wait.
#
# The ranks may belong to a team that computes several slots at once (``phalanx.run.layout``). The result of a slot must not depend
# on the other slots. So the rows of one expert and one slot are a *group* (``phalanx.model.layers.expert_groups``), in the
# order of source rank, then token. One permutation orders all rows by expert, slot, position. They go through the experts as one set
# of grouped products, so the number of GPU launches does not grow with the team.


@dataclass(frozen=True)
class TokenRoute:
    """Split sizes of an all-to-all: numbers of rows that the ranks send each other."""

    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    counts: Tensor
    """Rows from each rank for each local expert, ``(ranks, local experts)``, int64."""
    of_experts: list[int]
    """Rows for each local expert, from all ranks."""

    @property
    def return_route(self) -> TokenRoute:
        """The route of the results: sends and receives exchanged."""
        return replace(self, sent=self.received, received=self.sent)


@dataclass(frozen=True)
class ExpertExchange:
    """Dispatch and combine over ranks with different experts: rank ``i`` of ``group`` has the ``i``-th run of them."""

    group: dist.ProcessGroup
    slots: int
    """Number of slots of the ranks' tokens; the ranks of one slot are neighbors."""
    clock: CommClock
    apart: bool = True
    """True if each group's rows are multiplied by a separate product (``Groups.apart``)."""

    @uncompiled  # split sizes depend on the data
    def __call__(self, tokens: Tensor, routing: moe.Routing, experts: moe.Experts) -> Tensor:
        """Dispatch this rank's ``tokens`` ``(n, d)`` to their experts and combine the results: ``(n, d)``. A collective."""
        ranks = self.group.size()
        order = moe.order_by_expert(routing.experts, ranks * len(experts.up))  # step 1
        route = self._route(order.counts.view(ranks, -1))  # step 2, of counts (ranks, local experts)
        copies = _exchanged(moe.copies_by_expert(tokens, order), route, self)  # step 3: (received, d)
        results = _exchanged(
            self._compute(copies, route, experts), route.return_route, self
        )  # step 4: (sent, d)
        return moe.combine(results, order, routing.weights)  # (n, d)

    def _route(self, sending: Tensor) -> TokenRoute:
        """Exchange the token counts by expert, and return the route. Waits for the device."""
        coming = torch.empty_like(sending)  # (ranks, local experts)
        with self.clock.measure():
            dist.all_to_all_single(coming, sending, group=self.group)
        # (ranks + ranks + local experts,), on the host
        ranks, sums = len(sending), torch.cat((sending.sum(1), coming.sum(1), coming.sum(0))).tolist()
        return TokenRoute(sums[:ranks], sums[ranks : 2 * ranks], coming, sums[2 * ranks :])

    def _compute(self, copies: Tensor, route: TokenRoute, experts: moe.Experts) -> Tensor:
        """Return the local experts' results for ``copies`` ``(m, d)``, in their order: by rank, then expert, then token."""
        # Received rows are ordered by source rank, then expert, and the sources of a slot are neighbors. So an order by expert,
        # then source is also an order by expert, then slot.
        permutation, inverse = by_expert(route.counts, len(copies))
        counts = route.counts.view(self.slots, -1, route.counts.shape[1]).sum(1).t()  # (experts, slots)
        groups = groups_of_slots(counts.contiguous(), route.of_experts, apart=self.apart)
        # (m, d)
        return moe.permute(experts(moe.permute(copies, permutation, inverse), groups), inverse, permutation)


@dataclass(frozen=True)
class DividedExperts:
    """Experts whose matrices are divided over the tensor ranks, each of which has a piece of the sequence.

    Every rank needs the tokens of all ranks, so tokens and routing weights are gathered. The gradient of the routing returns to the
    rank that routed the token. The ranks' partial results are summed.
    """

    comm: SequenceComm
    inner: moe.Exchange

    @uncompiled
    def __call__(self, tokens: Tensor, routing: moe.Routing, experts: moe.Experts) -> Tensor:
        """Return the expert results of this rank's ``tokens`` ``(n, d)``: ``(n, d)``. A collective of the expert-tensor ranks."""
        all_tokens, weights = (
            self._gather(tokens),
            self._gather(routing.weights),
        )  # (n ranks, d), (n ranks, k)
        expert_ids = self.comm.stack(routing.experts).flatten(0, 1)  # (n ranks, k)
        partial = self.inner(all_tokens, moe.Routing(expert_ids, weights), experts)  # (n ranks, d)
        return self.comm.sum_scatter(partial.unsqueeze(0)).squeeze(0)  # (n, d)

    def _gather(self, rows: Tensor) -> Tensor:
        return self.comm.gather(rows.unsqueeze(0)).squeeze(0)  # (n ranks, .)


def by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that orders rows by expert, then source, and its inverse: ``(rows,)``, int64.

    Args:
        counts: Rows of each source for each expert, ``(sources, experts)``, int64. The rows are ordered by source, then expert.
        rows: Sum of ``counts``. Passed in because reading it from the device would wait for it.
    """
    return _moved(counts, rows), _moved(counts.t(), rows)


def _moved(sizes: Tensor, rows: int) -> Tensor:
    """Return the old index of each row, ``(rows,)``, when blocks of ``sizes`` ``(a, b)`` are reordered from ``a``,
    ``b`` to ``b``, ``a``.
    """
    # (b a,): begin of each block, in the new order of blocks
    begin_before = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    moved = sizes.t().flatten()  # (b a,)
    begin_after = moved.cumsum(0) - moved  # (b a,)
    shift = torch.repeat_interleave(begin_before - begin_after, moved, output_size=rows)  # (rows,)
    return torch.arange(rows, device=sizes.device) + shift


class _ExchangeContext(FunctionContext, Protocol):
    return_route: TokenRoute
    exchange: ExpertExchange


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, rows: Tensor, route: TokenRoute, exchange: ExpertExchange) -> Tensor:
        ctx.return_route, ctx.exchange = route.return_route, exchange
        return _sent(rows, route, exchange)

    @staticmethod
    def backward(ctx: _ExchangeContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return _sent(upstream[0], ctx.return_route, ctx.exchange), None, None


def _exchanged(rows: Tensor, route: TokenRoute, exchange: ExpertExchange) -> Tensor:
    """All-to-all, with gradient: ``rows`` ``(sent, d)`` to the received rows ``(received, d)``, both in the order of ranks."""
    return apply_function(_Exchange, rows, route, exchange)


def _sent(rows: Tensor, route: TokenRoute, exchange: ExpertExchange) -> Tensor:
    """Send rows along ``route`` with one all-to-all and return the received ones ``(received, d)``."""
    received = rows.new_empty((sum(route.received), rows.shape[1]))  # (received, d)
    with exchange.clock.measure():
        dist.all_to_all_single(received, rows.contiguous(), route.received, route.sent, group=exchange.group)
    return received

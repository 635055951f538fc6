"""FSDP2's extension points for communication: a reduce-scatter in tree order, and a timed all-gather.

With a sharded model, FSDP2 passes every parameter group's gradient to a reduce-scatter after each backward pass
(``FSDPModule.set_custom_reduce_scatter``). Ours is an all-to-all: the owner of a share of the parameters receives that share of
*every* slot's gradient, unsummed, and adds in the order of ``phalanx.parallel.reduction.tree``.

If the ranks are on several machines, equally many on each, the ranks of a machine exchange first and add what they can. Slots of a
round are assigned in the order of ranks, so the slots of a machine are neighbors in the tree. If their number is a power of two, one
sum is sent to each other machine, and the network carries that fraction of the bytes of all slots. For any other number, a few sums
are sent side by side. The additions are nodes of the same tree, so the bits are the same.

If a rank's slots are neighbors in the tree (a contiguous deal, ZeRO-1), it adds them itself, unsharded, and the exchange follows once
a step in place of once a round. With ``s`` slots, a power of two, a rank holds up to ``log2(s)`` whole gradients for that, and exchanges one.
With another number it holds and exchanges a few more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.local.device import CommClock
from phalanx.parallel.mesh import TwoLevels
from phalanx.parallel.reduction.tree import Leaves, LevelSums, TreeNode, TreeReducer, level_sums
from phalanx.parallel.torch_compat import AllGather, ReduceScatter, all_gather_single


class PlainBuffers:
    """Communication buffers for FSDP: uninitialized, because they are overwritten."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeReduceScatter(PlainBuffers, ReduceScatter):
    """Reduce-scatter of one FSDP parameter group, by all-to-all and addition in tree order.

    Until the last round of a step its output is meaningless; the caller drops the gradients that FSDP makes of it.

    Args:
        reducer: Receives the exchanged gradients.
        clock: Measures the exchange.
        levels: The group's machines, if the exchange has two levels.
        wire: Dtype in which gradients are sent; it must represent every element exactly.
    """

    def __init__(
        self,
        reducer: TreeReducer,
        clock: CommClock,
        levels: TwoLevels | None = None,
        wire: torch.dtype = torch.float32,
    ) -> None:
        """Exchange the nodes of ``reducer``: in two steps, inside and across machines, by ``levels``; in one if
        ``None``. ``wire`` is the dtype in which single slots are sent, and ``clock`` counts the time.
        """
        self.reducer, self.clock, self._levels, self._wire = reducer, clock, levels, wire

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002  the operation is always a sum
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Reduce: ``input_tensor`` ``(ranks * share,)`` is this rank's slot. A collective.

        After the last round ``output_tensor`` ``(share,)`` gets the sum over all slots and replicas; before, it gets
        zeros and the slot enters the tree. A slot that a witness keeps out gives zeros and is not exchanged.
        """
        if not self.reducer.intake.admit(self.reducer.name, input_tensor):
            output_tensor.zero_()
            return
        if self.reducer.leaves.deal.contiguous:
            self._push_subtree(input_tensor, group)
        elif self._levels is None:
            received = self._exchanged(input_tensor, group)
            self.reducer.push(received.view(group.size(), -1))  # (ranks, share)
        else:
            self._push_by_machine(input_tensor, self._levels)
        if self.reducer.intake.round.last:
            with self.clock.measure():
                self.reducer.finish(output_tensor)
        else:
            self.reducer.keep()
            output_tensor.zero_()

    def _exchanged(self, gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-to-all of equal pieces of ``gradient`` over ``group``, sent in the wire dtype."""
        sent = gradient.to(self._wire)
        received = torch.empty_like(sent)
        with self.clock.measure():
            dist.all_to_all_single(received, sent, group=group)
        del sent  # before the received ones are widened
        return received.to(gradient.dtype)

    def _push_by_machine(self, gradient: Tensor, levels: TwoLevels) -> None:
        """Exchange a slot's ``gradient`` ``(ranks * share,)`` in two levels, and push the resulting nodes of the tree."""
        reducer, machines, width = self.reducer, levels.machines, levels.width
        leaves = reducer.leaves.of_round(reducer.intake.round)
        plan = _plan_of_round(reducer.leaves.count, leaves, machines, width, gradient.device)
        share = gradient.numel() // (machines * width)
        # Step 1, inside the machine: rank p gets the shares of the ranks at position p of every machine.
        by_position = (
            gradient.view(machines, width, share).transpose(0, 1).reshape(-1)
        )  # (width * machines * share,)
        # (width, machines * share)
        slots = self._exchanged(by_position, levels.inside).view(width, machines * share)
        self._push_over_machines(slots, plan, levels)

    def _push_over_machines(self, rows: Tensor, plan: _MachinePlan, levels: TwoLevels) -> None:
        """Add the nodes of this machine's ranks, ``rows`` ``(nodes, machines * share)``, in place as far as they are
        neighbors. Exchange the remaining nodes across machines, and push those of this rank's share to its tree. A
        collective.
        """
        machines = levels.machines
        share = rows.shape[1] // machines
        # Step 2: add this machine's nodes as far as they are neighbors in the tree.
        own_sums = plan.machines[levels.machine]
        own_sums.add(rows)
        nodes = [rows[row].view(machines, share) for _, row in own_sums.remaining]  # (machines, share) each
        sent = torch.stack(nodes, 1).view(-1) if nodes else rows.new_empty(0)  # (machines * nodes * share,)
        # Step 3, across machines: receive every machine's nodes of this rank's own share: (nodes of all machines, share).
        get = [len(machine.remaining) * share for machine in plan.machines]
        received = rows.new_empty(sum(get))
        with self.clock.measure():
            dist.all_to_all_single(received, sent, get, [len(nodes) * share] * machines, group=levels.across)
        self.reducer.push_nodes(plan.across, received.view(-1, share))  # (nodes of all machines, share)

    def _push_subtree(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        """Add a slot's ``gradient`` ``(ranks * share,)`` to this rank's own tree. After the last round exchange the
        remaining nodes of all ranks, and push this rank's share of them. A collective then.
        """
        reducer, current = self.reducer, self.reducer.intake.round
        if current.counts:
            # A left leaf waits in the wire dtype, outside FSDP2's buffer; a right one is added to it at once.
            is_right = current.slot % 2 == 1 and (0, current.slot - 1) in reducer.unsharded.nodes
            reducer.unsharded.push(current.slot, gradient if is_right else gradient.to(self._wire, copy=True))
        if not current.last:
            return
        mesh = reducer.mesh
        machines, width = (self._levels.machines, self._levels.width) if self._levels else (1, group.size())
        plan = _plan_of_ranks(reducer.leaves, mesh.replica, mesh.shard_rank, machines, width, gradient.device)
        # Inside the machine, rank p gets the shares of the ranks at position p of every machine: (width, own nodes, machines * share).
        sent = gradient.new_empty(
            (width, len(plan.own), gradient.numel() // width),
            dtype=gradient.dtype if plan.has_sums else self._wire,
        )
        for number, node in enumerate(plan.own):
            value = reducer.unsharded.nodes.pop(node).view(machines, width, -1)  # (machines, width, share)
            sent[:, number] = value.transpose(0, 1).reshape(width, -1)  # (width, machines * share)
        piece = sent.shape[2]
        received = sent.new_empty((sum(plan.counts), piece))
        with self.clock.measure():
            # (received nodes * piece,), (width * own nodes * piece,)
            dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                [count * piece for count in plan.counts],
                [len(plan.own) * piece] * width,
                group=self._levels.inside if self._levels else group,
            )
        del sent  # before the received ones are widened
        rows = received.to(gradient.dtype)  # (nodes of the machine, machines * share)
        if self._levels:
            self._push_over_machines(rows, plan.sums, self._levels)
        else:
            reducer.push_nodes(plan.sums.machines[0], rows)


@dataclass(frozen=True)
class _MachinePlan:
    """Additions of an exchange: for each machine those of its ranks' nodes, and those of the machines' remaining nodes."""

    machines: tuple[LevelSums, ...]
    across: LevelSums


@functools.cache
def _plan_of_round(
    count: int, leaves: range, machines: int, width: int, device: torch.device
) -> _MachinePlan:
    """Plan the additions of ``leaves``, one of each rank, in a tree of ``count`` leaves. Cached."""
    forests = tuple(((0, leaf),) for leaf in leaves)
    return _plan(count, forests, machines, width, device)


@dataclass(frozen=True)
class _SubtreePlan:
    """The one exchange of a step, for a rank whose slots are contiguous."""

    own: tuple[TreeNode, ...]
    """The nodes that this rank sends."""
    counts: tuple[int, ...]
    """The number of nodes that each rank of this machine sends."""
    has_sums: bool
    """True if some rank sends a sum, which needs fp32; else all send a slot's gradient."""
    sums: _MachinePlan


@functools.cache
def _plan_of_ranks(
    leaves: Leaves, replica: int, shard_rank: int, machines: int, width: int, device: torch.device
) -> _SubtreePlan:
    """Plan the exchange of the nodes that the ranks of a contiguous deal have left. Cached, as it goes over all ranks."""
    forests = leaves.forests_of_ranks(replica)
    first = shard_rank // width * width
    return _SubtreePlan(
        own=forests[shard_rank],
        counts=tuple(len(forest) for forest in forests[first : first + width]),
        has_sums=any(level for forest in forests for level, _ in forest),
        sums=_plan(leaves.count, forests, machines, width, device),
    )


def _plan(
    count: int, forests: Sequence[Sequence[TreeNode]], machines: int, width: int, device: torch.device
) -> _MachinePlan:
    """Plan the additions of the ranks' ``forests``, where each machine has ``width`` of them."""
    parts = []
    for number in range(machines):
        own = forests[number * width : (number + 1) * width]
        parts.append(level_sums(count, [node for forest in own for node in forest], device))
    remaining = [node for part in parts for node, _ in part.remaining]
    return _MachinePlan(tuple(parts), level_sums(count, remaining, device))


class TimedAllGather(PlainBuffers, AllGather):
    """FSDP's own all-gather, with its time on a CPU measured."""

    def __init__(self, clock: CommClock) -> None:
        self.clock = clock

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work | None:
        """Concatenate every rank's ``input_tensor`` ``(n,)`` in ``output_tensor`` ``(ranks * n,)``, and count the
        time. Waits, whatever ``async_op`` is, and returns None.
        """
        with self.clock.measure():
            all_gather_single(output_tensor, input_tensor, group)
        return None

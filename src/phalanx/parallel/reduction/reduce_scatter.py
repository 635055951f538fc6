"""FSDP2's extension points for communication: a reduce-scatter in tree order, and a timed all-gather.

With a sharded model, FSDP2 passes every parameter group's gradient to a reduce-scatter after each backward pass
(``FSDPModule.set_custom_reduce_scatter``). Ours is an all-to-all: the owner of a share of the parameters receives that share of
*every* slot's gradient, unsummed, and adds in the order of ``phalanx.parallel.reduction.slot_tree``.

If the ranks are on several machines, equally many on each, the ranks of a machine exchange first and add what they can. Slots of a
round are assigned in the order of ranks, so the slots of a machine are neighbors in the tree. If their number is a power of two, one
sum is sent to each other machine, and the network carries that fraction of the bytes of all slots. For any other number, a few sums
are sent side by side. The additions are nodes of the same tree, so the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import TwoLevels
from phalanx.parallel.mesh.torch_compat import AllGather, ReduceScatter, all_gather_single
from phalanx.parallel.reduction.tree import LevelSums, TreeReducer, leaf_sums, level_sums


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
        zeros and the slot enters the tree.
        """
        if not self.reducer.intake.admit(self.reducer.name, input_tensor):
            output_tensor.zero_()
            return
        if self._levels is None:
            received = self._exchanged(input_tensor, group)
            self.reducer.push(received.view(group.size(), -1))
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
        plan = _plan(reducer.leaves.count, leaves, machines, width, gradient.device)
        share = gradient.numel() // (machines * width)
        # Step 1, inside the machine: rank p gets the shares of the ranks at position p of every machine.
        by_position = (
            gradient.view(machines, width, share).transpose(0, 1).reshape(-1)
        )  # (width * machines * share,)
        slots = self._exchanged(by_position, levels.inside).view(width, machines * share)
        # Step 2: add this machine's slots as far as they are neighbors in the tree.
        own_sums = plan.machines[levels.machine]
        own_sums.add(slots)
        nodes = [slots[row].view(machines, share) for _, row in own_sums.remaining]
        sent = torch.stack(nodes, 1).view(-1) if nodes else slots.new_empty(0)  # (machines * nodes * share,)
        # Step 3, across machines: receive every machine's nodes of this rank's own share: (nodes of all machines, share).
        get = [len(machine.remaining) * share for machine in plan.machines]
        received = slots.new_empty(sum(get))
        with self.clock.measure():
            dist.all_to_all_single(received, sent, get, [len(nodes) * share] * machines, group=levels.across)
        reducer.push_nodes(plan.across, received.view(-1, share))


@dataclass(frozen=True)
class _MachinePlan:
    """Additions of a round: for each machine those of its slots, and those of the machines' remaining nodes."""

    machines: tuple[LevelSums, ...]
    across: LevelSums


@functools.cache
def _plan(count: int, leaves: range, machines: int, width: int, device: torch.device) -> _MachinePlan:
    """Return which leaves each machine adds before the exchange, and what is added after it; made once."""
    parts = tuple(
        leaf_sums(count, leaves[number * width : (number + 1) * width], device) for number in range(machines)
    )
    nodes = [node for part in parts for node, _ in part.remaining]
    return _MachinePlan(parts, level_sums(count, nodes, device))


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
        """Concatenate every rank's ``input_tensor`` ``(n,)`` in ``output_tensor`` ``(ranks * n,)``."""
        with self.clock.measure():
            all_gather_single(output_tensor, input_tensor, group)
        return None

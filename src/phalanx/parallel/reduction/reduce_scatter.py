"""FSDP2's extension points for communication: a reduce-scatter in tree order, and an all-gather whose time is measured.

With a sharded model, FSDP2 hands every parameter group's gradient to a reduce-scatter after each backward pass
(``FSDPModule.set_custom_reduce_scatter``). Ours is an all-to-all: the rank that owns a share of the parameters receives that share of
*every* slot's gradient, unsummed, and adds in the order of ``phalanx.parallel.reduction.slot_tree``.

Where the ranks stand in several machines, as many in each, a machine's ranks exchange among themselves first and add what they can. Slots of
a round are dealt in the order of ranks, so the slots of a machine are neighbors in the tree: with a power of two of them, one sum goes on to each of
the other machines, and their network carries that share of the bytes of all slots. Any other number leaves a few sums, which are
passed on side by side. The additions are nodes of the same tree, so the bits are the same.
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
    """Communication buffers as FSDP asks for them: uninitialized, since they are written over anyway."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeReduceScatter(PlainBuffers, ReduceScatter):
    """The reduce-scatter of one FSDP parameter group, by all-to-all and addition in tree order.

    Until the last round of a step its output means nothing; whoever drives the step drops the gradients that FSDP
    makes of it.

    Args:
        reducer: Takes in what is exchanged.
        clock: Measures the exchange.
        levels: The group's machines, if the exchange is to be made in two levels.
        wire: The dtype in which slots' gradients are sent, if every one of their elements is exactly a number of that dtype.
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
        op: object,  # noqa: ARG002  the operation is a sum, whatever FSDP would have asked for
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """``input_tensor`` ``(ranks * share,)`` is this rank's slot; ``output_tensor`` ``(share,)`` is the sum."""
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
        """What the ranks of ``group`` send each other, each the same number of elements to all."""
        sent = gradient.to(self._wire)
        received = torch.empty_like(sent)
        with self.clock.measure():
            dist.all_to_all_single(received, sent, group=group)
        return received.to(gradient.dtype)

    def _push_by_machine(self, gradient: Tensor, levels: TwoLevels) -> None:
        """Exchanges a slot's ``gradient`` ``(ranks * share,)`` in two levels, and takes in what all ranks' slots add up to."""
        reducer, machines, width = self.reducer, levels.machines, levels.width
        leaves = reducer.leaves.of_round(reducer.intake.round)
        plan = _plan(reducer.leaves.count, leaves, machines, width, gradient.device)
        share = gradient.numel() // (machines * width)
        # Step 1, inside: rank p of this machine gets the shares of the ranks at place p in every machine: (width, machines, share).
        by_place = gradient.view(machines, width, share).transpose(0, 1).reshape(-1)
        slots = self._exchanged(by_place, levels.inside).view(width, machines * share)
        # Step 2: this machine's slots are added as far as they are neighbors in the tree: (nodes, machines, share).
        own = plan.machines[levels.machine]
        own.add(slots)
        nodes = [slots[row].view(machines, share) for _, row in own.left]
        sent = torch.stack(nodes, 1).view(-1) if nodes else slots.new_empty(0)  # (machines, nodes, share)
        # Step 3, across: every machine's nodes of this rank's own share, end to end: (nodes of all machines, share).
        get = [len(machine.left) * share for machine in plan.machines]
        received = slots.new_empty(sum(get))
        with self.clock.measure():
            dist.all_to_all_single(received, sent, get, [len(nodes) * share] * machines, group=levels.across)
        reducer.push_nodes(plan.whole, received.view(-1, share))


@dataclass(frozen=True)
class _MachinePlan:
    """The additions of a round: of each machine's slots, and of what all machines are left with."""

    machines: tuple[LevelSums, ...]
    whole: LevelSums


@functools.cache
def _plan(count: int, leaves: range, machines: int, width: int, device: torch.device) -> _MachinePlan:
    parts = tuple(
        leaf_sums(count, leaves[number * width : (number + 1) * width], device) for number in range(machines)
    )
    nodes = [node for part in parts for node, _ in part.left]
    return _MachinePlan(parts, level_sums(count, nodes, device))


class TimedAllGather(PlainBuffers, AllGather):
    """FSDP's own all-gather, with the time that a CPU spends in it measured."""

    def __init__(self, clock: CommClock) -> None:
        self.clock = clock

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work | None:
        """Concatenates every rank's ``input_tensor`` ``(n,)`` in ``output_tensor`` ``(ranks * n,)``."""
        with self.clock.measure():
            all_gather_single(output_tensor, input_tensor, group)
        return None

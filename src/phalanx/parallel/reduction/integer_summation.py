"""Gradient summation in integers: a rank adds its slots' gradients locally, and ranks exchange sums.

A rank adds its slots' gradients in bins (``reproducible_sums.py``), whose sums do not depend on the order. So ranks exchange their sums once. They
take a maximum of the spans' exponents, then a reduce-scatter or all-reduce of integers, which the library may run as it likes. With ZeRO-3 a rank has no memory for full gradients. There ranks exchange after every slot, and only the owner of
a share keeps its bins. The bits are the same either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.moe import Experts
from phalanx.parallel.divisions import Deal, Round, SpanLayout, in_buckets, share_layout
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.reduction.reduce_scatter import PlainBuffers
from phalanx.parallel.reduction.reproducible_sums import BinFormat, Bins
from phalanx.parallel.reduction.summation import Summation, leaves_of, weakly
from phalanx.parallel.reduction.tree import Intake, Leaves
from phalanx.parallel.torch_compat import ReduceScatter, group_shapes, reduce_scatter_single


class IntegerSummation(Summation):
    """Adds slots in integers, independent of which rank computed them and when.

    Args:
        mesh: The mesh of the model.
        clock: Measures exchanges.
        deal: Assignment of slots to ranks.
        each_round: True if gradient shares are exchanged after every round, so that no rank keeps full sums.
        reporters: Number of context ranks that share the elements of a slot's gradient, if only one of them has a number for each
            element and the others have zeros; else 1. It makes the width of a bin independent of the context degree.
    """

    slot_by_slot = True

    def __init__(
        self, mesh: Mesh, clock: CommClock, deal: Deal, *, each_round: bool, reporters: int = 1
    ) -> None:
        """Prepare sums for ``deal``. ``each_round`` exchanges shards after every round; ``reporters`` context ranks
        report parts of a slot.
        """
        super().__init__(mesh, clock)
        self._deal, self._each_round, self._reporters = deal, each_round, reporters
        self._reducers: list[IntegerReducer] = []
        self._unsharded: dict[nn.Parameter, IntegerReducer] = {}

    def reduce_groups(self, modules: Sequence[FSDPModule]) -> None:
        """Make each FSDP unit in ``modules`` reduce its gradients as integers: a custom reduce-scatter, or a hook on a
        single rank.
        """
        layout = self.mesh.layout
        for number, module in enumerate(modules):
            experts = isinstance(module, Experts)
            ranks = layout.expert_shard if experts else self.mesh.fsdp_ranks
            place = (
                int(self.mesh.expert_mesh.get_local_rank("expert_shard")) if experts else self.mesh.fsdp_rank
            )
            leaves = leaves_of(self.mesh, self._deal, experts=experts)
            # Experts get all tokens of a slot, for every context degree.
            summands = leaves.count // (1 if experts else self._reporters)
            reducer = self._reducer(str(number), leaves, summands, group_shapes(module), ranks, place)
            self._reducers.append(reducer)
            if ranks > 1:
                module.set_custom_reduce_scatter(IntegerReduceScatter(reducer))
            else:
                # FSDP2 skips the reduce-scatter of a single rank, but calls this hook with the gradient.
                module.set_all_reduce_hook(reducer.take_alone)

    def _reducer(
        self,
        name: str,
        leaves: Leaves,
        summands: int,
        shapes: Iterable[Sequence[int]],
        ranks: int,
        place: int,
    ) -> IntegerReducer:
        """Return a reducer that divides a group of ``shapes`` over ``ranks``, of which this one is at ``place``.

        Several ranks exchange after every round if the summation was made with ``each_round``, else after the last.
        """
        each_round = self._each_round and ranks > 1
        return IntegerReducer(
            *(name, self.mesh, self.clock, leaves, summands, self.intake, share_layout(shapes, ranks)),
            shares=ranks,
            place=place,
            each_round=each_round,
        )

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the gradients of ``parameters``, which FSDP has not wrapped, by hooks after each accumulation."""
        push = weakref.WeakMethod(self._push)  # see TreeSummation
        for name, parameter in parameters.items():
            leaves = Leaves(self._deal, 1)
            self._unsharded[parameter] = self._reducer(name, leaves, leaves.count, [parameter.shape], 1, 0)
            parameter.register_post_accumulate_grad_hook(weakly(push))  # type: ignore[no-untyped-call]

    def _push(self, tensor: Tensor) -> None:
        """Add the parameter's gradient to its sum and clear it. Does nothing before the slot is complete, or without a gradient."""
        parameter = cast(nn.Parameter, tensor)
        if self.intake.slot_complete and parameter.grad is not None:
            self._unsharded[parameter].take_in(parameter.grad)
            parameter.grad = None

    def take_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Push the complete gradients of unsharded parameters of a slot into the bins."""
        self.intake.slot_complete = True
        for parameter in parameters:
            self._push(parameter)

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradient of each of ``parameters`` to the sum over all slots and replicas, and clear the sums.

        A collective if there are several replicas. Raises ``ValueError`` for a parameter that lacks a slot's gradient.
        """
        for bucket in in_buckets(parameters, nn.Parameter.numel):
            sums = [self._unsharded[parameter].take_out() for parameter in bucket]
            if self.mesh.replicas > 1:
                with self.clock.measure():
                    _add_over_replicas(sums, self.mesh)
            for parameter, bins in zip(bucket, sums, strict=True):
                parameter.grad = torch.empty_like(parameter)
                bins.total(parameter.grad.view(1, -1))  # (1, elements)

    def clear(self) -> None:
        for reducer in (*self._unsharded.values(), *self._reducers):
            reducer.clear()


@dataclass
class IntegerReducer:
    """Sums the gradient of one parameter group over all slots of a step."""

    name: str
    mesh: Mesh
    clock: CommClock
    leaves: Leaves
    summands: int
    """Number of summands for each element; zeros of context ranks that do not report are not counted."""
    intake: Intake
    layout: SpanLayout
    """Spans of each of the ``shares`` into which ranks divide the group."""
    shares: int
    place: int
    """Index of the share that this rank owns, and of its slot among those of a round."""
    each_round: bool
    """True if a rank keeps only its own share from one round to the next."""
    bins: Bins | None = field(default=None, init=False)
    _added_slots: set[int] = field(default_factory=set, init=False)

    def take_in(self, gradient: Tensor, group: dist.ProcessGroup | None = None) -> bool:
        """Add this rank's gradient of the current round, with all shares. Return False if a witness keeps it out of
        the sum. A rank without a slot of its own adds nothing, but takes part.

        ``group`` are the ranks that own the shares; ``None`` for a single one. They exchange in each round or after
        the last. Raises ``ValueError`` if the slot was added before.
        """
        if not self.intake.admit(self.name, gradient):
            return False
        current = self.intake.round
        new = (
            Bins.empty(self.shares, self.layout, BinFormat(self.summands), gradient.device)
            if self.each_round or self.bins is None
            else self.bins
        )
        if self.place < len(self.leaves.of_round(current)):
            if current.slot in self._added_slots:
                raise ValueError(f"slot {current.slot} was given twice")
            self._added_slots.add(current.slot)
            new.add_gradient(gradient.view(self.shares, self.layout.elements))  # (shares, elements)
        if group is not None and (self.each_round or current.last):
            with self.clock.measure():
                new = _reduce_scatter(new, self.place, group)
        if self.each_round and self.bins is not None:
            self.bins.add(new)
        else:
            self.bins = new
        return True

    def take_out(self) -> Bins:
        """Return the sum of all slots of this replica, and clear it. Raise ``ValueError`` if slots are missing; the sum
        is cleared then too.
        """
        bins, added = self.bins, len(self._added_slots)
        self.clear()
        rounds = self.leaves.deal.rounds(self.mesh.replica)
        yields = [len(self.leaves.of_round(Round(slots, 0, counts=True, last=False))) for slots in rounds]
        expected = sum(self.place < count for count in yields)
        if bins is None or added != expected:
            raise ValueError(f"slots are missing: {self.name} has the gradients of {added} of {expected}")
        return bins

    def finish(self, out: Tensor) -> None:
        """Write the sum over all slots of the fleet into ``out``, this rank's share, and clear it."""
        bins = self.take_out()
        if self.mesh.replicas > 1:
            with self.clock.measure():
                _add_over_replicas([bins], self.mesh)
        bins.total(out.view(1, -1))  # (1, elements)

    def take_alone(self, gradient: Tensor) -> None:
        """Take in the gradient of a group that only this rank has; after the last round replace it by the sum."""
        if self.take_in(gradient) and self.intake.round.last:
            self.finish(gradient)

    def clear(self) -> None:
        """Discard the sum."""
        self.bins = None
        self._added_slots.clear()


class IntegerReduceScatter(PlainBuffers, ReduceScatter):
    """Reduce-scatter of one FSDP parameter group, in integers.

    Until the last round of a step its output is meaningless; the caller drops the gradients that FSDP makes of it.
    """

    def __init__(self, reducer: IntegerReducer) -> None:
        self.reducer = reducer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002  the operation is always a sum
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Add ``input_tensor`` ``(ranks * share,)``, this rank's slot. After the last round ``output_tensor``
        ``(share,)`` gets the sum over all slots and replicas; before, or if a witness keeps the slot out, zeros.
        """
        if self.reducer.take_in(input_tensor, group) and self.reducer.intake.round.last:
            self.reducer.finish(output_tensor)
        else:
            output_tensor.zero_()


def _reduce_scatter(bins: Bins, place: int, group: dist.ProcessGroup) -> Bins:
    """Return the sum of the bins of all ranks of ``group`` for the share at ``place``. Raises this rank's bins to the
    common tops. A collective.
    """
    tops = bins.tops.clone()
    dist.all_reduce(tops, dist.ReduceOp.MAX, group)
    bins.raise_to(tops)
    words = bins.words.new_empty((1, *bins.words.shape[1:]))  # (1, 2, elements)
    reduce_scatter_single(words.view(-1), bins.words.view(-1), group)  # (2 elements,), (shares 2 elements,)
    return Bins(bins.layout, bins.format, words, tops[place : place + 1].clone())


def _add_over_replicas(sums: Sequence[Bins], mesh: Mesh) -> None:
    """Replace each of ``sums``, of this rank's share, by the sum over all replicas, in two exchanges. A collective."""
    group = mesh.replicate_group
    tops = torch.cat([bins.tops.view(-1) for bins in sums])  # (spans of all sums,)
    dist.all_reduce(tops, dist.ReduceOp.MAX, group)
    # raised: (spans,)
    for bins, raised in zip(sums, torch.split(tops, [bins.tops.numel() for bins in sums]), strict=True):
        bins.raise_to(raised.view_as(bins.tops))
    # (2 elements of all sums,)
    words = torch.cat([bins.words.view(-1) for bins in sums]) if len(sums) > 1 else sums[0].words.view(-1)
    dist.all_reduce(words, group=group)
    # added: (2 elements,)
    for bins, added in zip(sums, torch.split(words, [bins.words.numel() for bins in sums]), strict=True):
        bins.words = added.view_as(bins.words)

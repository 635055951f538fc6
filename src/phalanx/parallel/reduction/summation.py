"""Gradient summation over the slots of a step: in tree order, in integers, or in the library's order.

One of the two choices in data parallelism. The other, sharded or unsharded weights, is in ``data_parallel.py``, which calls this
module:

- ``TreeSummation``: every slot's gradient enters a tree of all slots separately, so the sum has the same bits on any number of ranks
  (``reduction = "reproducible"``).
- ``IntegerSummation`` (``integer_summation.py``): every slot's gradient is added in integers, whose sum has the same bits in any
  order (``reduction = "integer"``).
- ``FastSummation``: gradients accumulate in place, and a reduce-scatter or all-reduce adds them (``reduction = "fast"``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.moe import Experts
from phalanx.parallel.divisions import Deal, Round, in_buckets
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.reduction.reduce_scatter import TreeReduceScatter
from phalanx.parallel.reduction.tree import (
    Intake,
    Leaves,
    SlotTree,
    TreeNode,
    TreeReducer,
    admit_all,
    exchange,
)


class Summation(ABC):
    """Sum over all slots of a step. One object serves one model, which is either sharded or unsharded.

    Hooks that a kind of sum has no use for do nothing: fast sums accumulate in ``grad``, and integers have no tree.
    """

    slot_by_slot: ClassVar[bool]
    """True if each slot's gradient must be reduced separately; else gradients may accumulate on a rank first."""

    def __init__(self, mesh: Mesh, clock: CommClock) -> None:
        self.mesh, self.clock = mesh, clock
        self.intake = Intake()

    def loss_weight(self, current: Round) -> float:  # noqa: ARG002  results that do not count are left out of most sums
        """Return the factor on a rank's loss: 0 if the gradient of a result that must not count would be added."""
        return 1.0

    @abstractmethod
    def reduce_groups(self, modules: Sequence[FSDPModule]) -> None:
        """Set how FSDP2 reduces the gradient of each parameter group of a sharded model. Called once, first."""

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:  # noqa: B027
        """Prepare for the gradients of unsharded parameters, by name. Called once, first."""

    def add_to_siblings(self) -> None:  # noqa: B027
        """Hook before a slot's last backward pass: may make it accumulate into an earlier sum."""

    def take_whole(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027
        """Take in the ``grad`` of unsharded parameters when it is complete for a slot."""

    @abstractmethod
    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the ``grad`` of unsharded parameters to the sum of all slots, after the last round."""

    def clear(self) -> None:  # noqa: B027
        """Discard the sum of a finished or aborted step."""


class TreeSummation(Summation):
    """Adds slots in the order of ``phalanx.parallel.reduction.tree``, independent of which rank computed them and when."""

    slot_by_slot = True

    def __init__(self, mesh: Mesh, clock: CommClock, deal: Deal, wire: torch.dtype = torch.float32) -> None:
        """Prepare trees for the slots of ``deal``. ``wire`` is the dtype in which single slots are sent."""
        super().__init__(mesh, clock)
        self._deal, self._wire = deal, wire
        self._reducers: list[TreeReducer] = []
        self._trees: dict[nn.Parameter, SlotTree[Tensor]] = {}
        self._accumulating: set[nn.Parameter] = set()
        self.spare: dict[nn.Parameter, list[Tensor]] = {}
        """Free buffers by parameter."""
        self._names: dict[nn.Parameter, str] = {}

    def reduce_groups(self, modules: Sequence[FSDPModule]) -> None:
        """Make each FSDP unit in ``modules`` reduce its gradients in the tree of slots: by a custom reduce-scatter
        over several ranks, or a hook on a single one.
        """
        dense = (
            leaves_of(self.mesh, self._deal, experts=False),
            self.mesh.fsdp_ranks,
            self.mesh.fsdp_levels,
        )
        experts = (
            leaves_of(self.mesh, self._deal, experts=True),
            self.mesh.layout.expert_shard,
            self.mesh.expert_levels,
        )
        for number, module in enumerate(modules):
            leaves, ranks, levels = experts if isinstance(module, Experts) else dense
            reducer = TreeReducer(str(number), self.mesh, leaves, self.intake)
            # The sum of a hand's slots is fp32, even if single slots' gradients are narrower.
            of_hands = isinstance(module, Experts) and self.mesh.layout.team > 1
            wire = torch.float32 if of_hands else self._wire
            self._reducers.append(reducer)
            if ranks > 1:
                module.set_custom_reduce_scatter(TreeReduceScatter(reducer, self.clock, levels, wire))
            else:
                # FSDP2 skips the reduce-scatter of a single rank, but calls this hook with the gradient.
                module.set_all_reduce_hook(reducer.take_alone)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Push the gradients of ``parameters``, which FSDP has not wrapped, to their trees by hooks after each accumulation."""
        # A hook with a strong reference would make a cycle through C++ that Python's collector cannot see. The model and its
        # process groups, with their threads, would then outlive the rank's membership.
        push = weakref.WeakMethod(self._push)
        for name, parameter in parameters.items():
            self._names[parameter] = name
            self.spare[parameter] = []
            self._trees[parameter] = SlotTree(self._deal.slots, partial(_add_in_place, self.spare[parameter]))
            # During the backward pass, while the gradient is still in the cache.
            parameter.register_post_accumulate_grad_hook(weakly(push))  # type: ignore[no-untyped-call]

    def add_to_siblings(self) -> None:
        """Before an odd slot, move the even sibling's gradient from each tree to the parameter, so that backward
        accumulates into it: saves a buffer.

        Does nothing in a pipeline or during an audit.
        """
        # A right sibling's gradient is not needed separately, except by a witness. So the backward pass adds it to the left one,
        # which is the same addition without a second set of gradients. Not in a pipeline: it may postpone weight gradients and
        # deliver them in pieces, which would change the order of additions.
        slot = self.intake.round.slot
        if slot % 2 == 0 or self.mesh.layout.pipeline > 1 or self.intake.admit is not admit_all:
            return
        for parameter, tree in self._trees.items():
            if parameter.grad is None and (0, slot - 1) in tree.nodes:
                parameter.grad = tree.nodes.pop((0, slot - 1))
                self._accumulating.add(parameter)

    def _push(self, tensor: Tensor) -> None:
        """Push the parameter's complete gradient to its tree as the slot's leaf, or as the pair's node, and clear it.

        Does nothing before the slot is complete, or without a gradient. A leaf that the witness keeps out is only
        cleared.
        """
        parameter, slot = cast(nn.Parameter, tensor), self.intake.round.slot
        if not self.intake.slot_complete or parameter.grad is None:
            return
        if parameter in self._accumulating:
            self._accumulating.discard(parameter)
            self._trees[parameter].push_node((1, slot // 2), parameter.grad)
        elif self.intake.admit(self._names[parameter], parameter.grad):
            # Copied into a free buffer, if there is one, so that the gradient's own memory can serve the next layer's.
            spare = self.spare[parameter]
            self._trees[parameter].push(slot, spare.pop().copy_(parameter.grad) if spare else parameter.grad)
        parameter.grad = None

    def take_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return the siblings' sums of ``add_to_siblings`` to their trees, and push the gradients of ``parameters`` as
        a slot's leaves.
        """
        for parameter in self._accumulating:  # the backward pass gave them no gradient
            self._trees[parameter].push_node((0, self.intake.round.slot - 1), cast(Tensor, parameter.grad))
            parameter.grad = None
        self._accumulating.clear()
        self.intake.slot_complete = True
        for parameter in parameters:
            self._push(parameter)

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradient of each of ``parameters`` to the sum of all slots and replicas, and empty the trees. A
        collective if there are several replicas.
        """
        if self.mesh.replicas == 1:
            for parameter in parameters:
                parameter.grad = self._trees[parameter].take_root()
                _put_aside(self.spare[parameter], parameter.grad)  # not used again before the next step
            return
        leaves = Leaves(self._deal, 1)
        forest = leaves.forest(self.mesh.replica)
        for bucket in in_buckets(parameters, nn.Parameter.numel):
            # For each node of the forest, the bucket's parameters end to end: (elements of the bucket,).
            nodes = [
                torch.cat([self._pop_node(parameter, node).reshape(-1) for parameter in bucket])
                for node in forest
            ]
            total = torch.empty_like(nodes[0])
            with self.clock.measure():
                exchange(nodes, leaves, self.mesh, total)
            _hand_out(total, bucket)

    def _pop_node(self, parameter: nn.Parameter, node: TreeNode) -> Tensor:
        """Remove and return a node of a parameter's tree; its memory is reused afterwards."""
        value = self._trees[parameter].nodes.pop(node)
        _put_aside(self.spare[parameter], value)
        return value

    def clear(self) -> None:
        """Drop all nodes of all trees."""
        self._accumulating.clear()
        for tree in self._trees.values():
            tree.nodes.clear()
        for reducer in self._reducers:
            reducer.clear()


class FastSummation(Summation):
    """Adds gradients in the order of accumulation and of the library's collectives."""

    slot_by_slot = False

    def reduce_groups(self, modules: Sequence[FSDPModule]) -> None:
        """Make FSDP sum gradients instead of averaging them."""
        for module in modules:
            # A sum, not FSDP's mean: the loss is already divided by the tokens of the step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce the gradients of ``parameters`` over the replicas, in buckets. Does nothing with one replica."""
        if self.mesh.replicas == 1:
            return
        for bucket in in_buckets(parameters, nn.Parameter.numel):
            # (elements of the bucket,)
            flat = torch.cat([cast(Tensor, parameter.grad).reshape(-1) for parameter in bucket])
            with self.clock.measure():
                dist.all_reduce(flat, group=self.mesh.replicate_group)
            _hand_out(flat, bucket)

    def loss_weight(self, current: Round) -> float:
        return 1.0 if current.counts else 0.0


def leaves_of(mesh: Mesh, deal: Deal, *, experts: bool) -> Leaves:
    """Return the leaves of the tree of a sharded parameter group's gradient: for dense parameters one for each
    context rank of a team's slots, for experts one for each expert shard rank.
    """
    layout = mesh.layout
    # Context ranks see different parts of a slot; experts get the tokens of several ranks at once.
    of_experts = layout.expert_shard // (layout.shard // layout.team)
    return Leaves(deal, of_experts if experts else layout.team * layout.context)


def _add_in_place(spare: list[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """``SlotTree`` addition in the memory of ``left``; the memory of ``right`` is put aside."""
    _put_aside(spare, right)
    return left.add_(right)


def _put_aside(spare: list[Tensor], value: Tensor) -> None:
    """Keep the memory of a sum for a later gradient, on a CPU only, where freed memory is mapped again page by page.

    A tree then keeps the most that it needs in a step: at most one set of gradients for each of its levels. GPU memory stays with
    PyTorch's allocator, which reuses it at no cost.
    """
    if value.device.type == "cpu":
        spare.append(value)


def weakly(push: Callable[[], Callable[[Tensor], None] | None]) -> Callable[[Tensor], None]:
    """Return a parameter hook that calls the method to which ``push`` is a weak reference, as long as its object exists."""

    def hook(parameter: Tensor) -> None:
        call = push()
        if call is not None:
            call(parameter)

    return hook


def _hand_out(flat: Tensor, bucket: Sequence[nn.Parameter]) -> None:
    """Make the pieces of ``flat`` the gradients of the parameters of ``bucket``."""
    pieces = torch.split(flat, [parameter.numel() for parameter in bucket])  # (elements of a parameter,) each
    for parameter, piece in zip(bucket, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)

"""Spreads a plain model over the data-parallel axes and drives its gradients through a step.

The tensor, context and expert axes have left each rank with a smaller plain module by now, and the pipeline with one or
more parts of it (its stages).

Three ways of holding the model, one interface:

- ``Sharded``: FSDP2 (``fully_shard``), ZeRO-3 or, with weights kept after forward, ZeRO-2; replicas of the shards
  make it hybrid. Also used unsharded when compute runs in a narrower format than the master weights, because
  FSDP2 makes the narrow copy.
- ``Whole``: every rank holds the module as it is. No FSDP: nothing to gather, nothing to copy.

The caller loops over ``rounds()``; for each it calls ``begin(round)``, runs forward and backward of the slot's
micro-batches, and calls ``end(round)``; after the last round ``gradients()`` holds this rank's share of the sum.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.model.block import Block
from phalanx.model.custom import blocks_of
from phalanx.model.layers.moe import Experts, MoE
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.mesh.slots import Deal, Leaves, SlotTree
from phalanx.parallel.mesh.torch_compat import finish_backward
from phalanx.parallel.reduction.tree import (
    CurrentRound,
    TimedAllGather,
    TreeReducer,
    TreeReduceScatter,
    exchange,
)
from phalanx.run.spec import RunSpec

_BUCKET_ELEMENTS = 8 << 20  # of one exchange between replicas: 32 MiB in fp32, enough to fill any link


@dataclass(frozen=True)
class Round:
    """One round of a step: what every shard rank of this replica computes at the same time."""

    slots: tuple[int | None, ...]
    slot: int
    """What this rank computes: its own slot, or when it has none, a neighbor's, whose result is dropped."""
    counts: bool
    """Whether this rank's result counts."""
    last: bool


def rounds_of(deal: Deal, replica: int, shard_rank: int) -> list[Round]:
    """The rounds of one rank.

    A team without slots computes those of the round's first team again: the collectives inside forward and backward
    need it, and the time is idle anyhow.
    """
    dealt = deal.rounds(replica)
    rounds = []
    for number, slots in enumerate(dealt):
        mine, stand_in = slots[shard_rank], slots[shard_rank % deal.team]
        assert stand_in is not None, "a round begins with a team's slots"
        last = number == len(dealt) - 1
        rounds.append(Round(slots, stand_in if mine is None else mine, mine is not None, last))
    return rounds


class DataParallel(Protocol):
    """A model spread over the data-parallel axes."""

    mesh: Mesh
    parts: Sequence[nn.Module]
    """The stages of the model that this rank holds; without a pipeline, the whole model."""
    clock: CommClock
    """Time that the rank stood still in collectives."""

    @abstractmethod
    def begin(self, current: Round) -> None:
        """Before the forward pass of a round's first micro-batch."""

    @abstractmethod
    def before_backward(self, part: int, *, last: bool) -> None:
        """Before each backward pass through a part; with the ``last`` one, the slot's gradient is complete."""

    @abstractmethod
    def after_weights(self, part: int, *, last: bool) -> None:
        """After weight gradients of a part that had been put off were added, outside of any backward pass."""

    @abstractmethod
    def end(self, current: Round) -> None:
        """After a round's last backward pass."""

    @abstractmethod
    def abandon(self) -> None:
        """Forgets all gradients, of a finished step or of one that was broken off."""

    @abstractmethod
    def loss_weight(self, current: Round) -> float:
        """By what a rank multiplies its loss: 0 where a result that does not count would be added."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of all parts, by name."""
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """What this rank holds of every gradient, by name. Raises ``RuntimeError`` if a parameter has none."""
    found = {}
    for name, parameter in named_parameters(parts).items():
        if parameter.grad is None:
            raise RuntimeError(f"{name} got no gradient: every parameter must take part in the loss")
        found[name] = local(parameter.grad)
    return found


def reshard(parts: Sequence[nn.Module]) -> None:
    """Gives up whole weights that a forward pass without a backward has left gathered (and narrow copies of them)."""
    for module in _fsdp_modules(parts):
        module.reshard()


def spread(parts: Sequence[nn.Module], mesh: Mesh, spec: RunSpec, clock: CommClock) -> DataParallel:
    """Spreads ``parts`` (on the meta device) over ``mesh`` as ``spec.parallel`` and ``spec.precision`` say.

    Afterwards every rank has memory for what it holds of the parameters, but nothing in it: a fill or a restore
    follows.
    """
    deal = mesh.deal(spec.train.slots)
    reproducible = spec.train.reduction == "reproducible"
    narrow = spec.precision.compute == "bf16"
    experts_whole = spec.model.moe is None or mesh.layout.expert_shard == 1
    if mesh.fsdp_ranks == 1 and experts_whole and not narrow:
        for part in parts:
            part.to_empty(device=mesh.device)
        return WholeByTree(parts, mesh, clock, deal) if reproducible else WholeFast(parts, mesh, clock)
    keep_weights = spec.parallel.sharding != "zero3"
    for part in parts:
        _shard(part, mesh, narrow=narrow, by_tree=reproducible, keep_weights=keep_weights)
        part.to_empty(device=mesh.device)
    if clock.blocking:
        for module in _fsdp_modules(parts):
            module.set_custom_all_gather(TimedAllGather(clock))
    if reproducible:
        return ShardedByTree(parts, mesh, clock, deal, keep_weights=keep_weights)
    return ShardedFast(parts, mesh, clock, keep_weights=keep_weights)


def _shard(part: nn.Module, mesh: Mesh, *, narrow: bool, by_tree: bool, keep_weights: bool) -> None:
    """Wraps a part's experts, blocks and root, each a group of parameters that is gathered at once."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.float32,
        # The rotary tables are computed in fp32; the model casts where it wants to.
        cast_forward_inputs=False,
    )
    # The tree sums over replicas itself.
    alone = by_tree or mesh.replicas == 1
    dense = mesh.dense["fsdp"] if alone else mesh.dense["replicate", "fsdp"]
    experts = mesh.expert_mesh["expert_shard"] if alone else mesh.expert_mesh["replicate", "expert_shard"]
    for block in blocks_of(part):
        if isinstance(block, Block) and isinstance(block.ffn, MoE):
            fully_shard(
                block.ffn.experts, mesh=experts, reshard_after_forward=not keep_weights, mp_policy=policy
            )
        fully_shard(block, mesh=dense, reshard_after_forward=not keep_weights, mp_policy=policy)
    # The root's weights (embedding, head) are needed again at the start of backward: keep them.
    fully_shard(part, mesh=dense, reshard_after_forward=False, mp_policy=policy)


def _fsdp_modules(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    return (module for part in parts for module in part.modules() if isinstance(module, FSDPModule))


class ShardedByTree(DataParallel):
    """FSDP2 with gradients summed in tree order."""

    def __init__(
        self, parts: Sequence[nn.Module], mesh: Mesh, clock: CommClock, deal: Deal, *, keep_weights: bool
    ) -> None:
        self.parts, self.mesh, self.clock = parts, mesh, clock
        self._step, self._keep_weights = CurrentRound(), keep_weights
        # While weights are gathered the modules show the whole ones; these are the shares, whose gradients count.
        self._shares = list(named_parameters(parts).values())
        layout = mesh.layout
        dense = Leaves(deal, layout.team * layout.context), mesh.fsdp_ranks
        experts = Leaves(deal, layout.expert_shard // (layout.shard // layout.team)), layout.expert_shard
        self._reducers = []
        for module in _fsdp_modules(parts):
            leaves, ranks = experts if isinstance(module, Experts) else dense
            reducer = TreeReducer(mesh, leaves, self._step)
            self._reducers.append(reducer)
            if ranks > 1:
                module.set_custom_reduce_scatter(TreeReduceScatter(reducer, clock))
            else:
                # FSDP2 skips the reduce-scatter of a single rank, but calls this hook with the gradient.
                module.set_all_reduce_hook(_tree_hook(reducer))

    def begin(self, current: Round) -> None:
        self._step.round_slots, self._step.last_round = current.slots, current.last

    def before_backward(self, part: int, *, last: bool) -> None:
        root = cast(FSDPModule, self.parts[part])
        root.set_requires_gradient_sync(last)
        # ZeRO-2 gathers weights once a step: they change only after its last backward pass.
        root.set_reshard_after_backward((last and self._step.last_round) or not self._keep_weights)

    def after_weights(self, part: int, *, last: bool) -> None:  # noqa: ARG002  known from before backward
        finish_backward(cast(FSDPModule, self.parts[part]))

    def end(self, current: Round) -> None:
        if not current.last:
            # The trees hold this round's gradients; what FSDP would accumulate means nothing yet.
            for share in self._shares:
                share.grad = None

    def abandon(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        for share in self._shares:
            share.grad = None
        for reducer in self._reducers:
            reducer.clear()

    def loss_weight(self, current: Round) -> float:  # noqa: ARG002  the tree ignores what does not count
        return 1.0


def _tree_hook(reducer: TreeReducer) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        # FSDP2 makes parameters' gradients from this buffer afterwards, so the tree needs its own copy.
        reducer.push(gradient.clone().unsqueeze(0))
        if reducer.step.last_round:
            reducer.finish(gradient)

    return hook


class ShardedFast(DataParallel):
    """FSDP2 as PyTorch does it: gradients added in whatever order the library likes."""

    def __init__(
        self, parts: Sequence[nn.Module], mesh: Mesh, clock: CommClock, *, keep_weights: bool
    ) -> None:
        self.parts, self.mesh, self.clock = parts, mesh, clock
        self._keep_weights = keep_weights
        self._last_round = False
        for module in _fsdp_modules(parts):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def begin(self, current: Round) -> None:
        self._last_round = current.last

    def before_backward(self, part: int, *, last: bool) -> None:
        root = cast(FSDPModule, self.parts[part])
        # ZeRO-2 keeps whole gradients until the end of the step; ZeRO-3 shares them out after every slot.
        root.set_requires_gradient_sync(last and (self._last_round or not self._keep_weights))
        root.set_requires_all_reduce(self._last_round)
        root.set_reshard_after_backward((last and self._last_round) or not self._keep_weights)

    def after_weights(self, part: int, *, last: bool) -> None:  # noqa: ARG002  known from before backward
        finish_backward(cast(FSDPModule, self.parts[part]))

    def end(self, current: Round) -> None:
        pass

    def abandon(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def loss_weight(self, current: Round) -> float:
        return 1.0 if current.counts else 0.0


class WholeByTree(DataParallel):
    """The whole module on every rank, gradients summed in tree order."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh, clock: CommClock, deal: Deal) -> None:
        self.parts, self.mesh, self.clock, self._leaves = parts, mesh, clock, Leaves(deal, 1)
        self._slot, self._slot_complete = 0, False
        self._trees: dict[nn.Parameter, SlotTree[Tensor]] = {}
        # A hook that held this object would make a cycle through C++ that Python's collector cannot see: the model
        # and its process groups, with their threads, would outlive a rank's leaving.
        push = weakref.WeakMethod(self._push)
        for parameter in named_parameters(parts).values():
            self._trees[parameter] = SlotTree(deal.slots, lambda left, right: left.add_(right))
            # During the backward pass, while the gradient is still in the cache.
            parameter.register_post_accumulate_grad_hook(_weakly(push))  # type: ignore[no-untyped-call]

    def _push(self, parameter: Tensor) -> None:
        if self._slot_complete and parameter.grad is not None:
            self._trees[cast(nn.Parameter, parameter)].push(self._slot, parameter.grad)
            parameter.grad = None

    def begin(self, current: Round) -> None:
        self._slot = current.slot

    def before_backward(self, part: int, *, last: bool) -> None:  # noqa: ARG002
        self._slot_complete = last

    def after_weights(self, part: int, *, last: bool) -> None:
        pass

    def end(self, current: Round) -> None:
        # What a split backward pass has accumulated without PyTorch's hooks noticing.
        for parameter in self._trees:
            self._slot_complete = True
            self._push(parameter)
        if current.last:
            self._finish()

    def _finish(self) -> None:
        if self.mesh.replicas == 1:
            for parameter, tree in self._trees.items():
                parameter.grad = tree.take_root()
            return
        forest = self._leaves.forest(self.mesh.replica)
        for bucket in _buckets(list(self._trees)):
            nodes = [
                torch.cat([self._trees[parameter].nodes.pop(node).reshape(-1) for parameter in bucket])
                for node in forest
            ]
            total = torch.empty_like(nodes[0])
            with self.clock.measure():
                exchange(nodes, self._leaves, self.mesh, total)
            _hand_out(total, bucket)

    def abandon(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        for tree in self._trees.values():
            tree.nodes.clear()

    def loss_weight(self, current: Round) -> float:  # noqa: ARG002  every round of a lone rank counts
        return 1.0


def _weakly(push: Callable[[], Callable[[Tensor], None] | None]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        call = push()
        if call is not None:
            call(parameter)

    return hook


class WholeFast(DataParallel):
    """The whole module on every rank, gradients accumulated in place and summed by all-reduce."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh, clock: CommClock) -> None:
        self.parts, self.mesh, self.clock = parts, mesh, clock

    def begin(self, current: Round) -> None:
        pass

    def before_backward(self, part: int, *, last: bool) -> None:
        pass

    def after_weights(self, part: int, *, last: bool) -> None:
        pass

    def end(self, current: Round) -> None:
        if not current.last or self.mesh.replicas == 1:
            return
        for bucket in _buckets(list(named_parameters(self.parts).values())):
            flat = torch.cat([cast(Tensor, parameter.grad).reshape(-1) for parameter in bucket])
            with self.clock.measure():
                dist.all_reduce(flat, group=self.mesh.replicate_group)
            _hand_out(flat, bucket)

    def abandon(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def loss_weight(self, current: Round) -> float:
        return 1.0 if current.counts else 0.0


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _hand_out(flat: Tensor, bucket: list[nn.Parameter]) -> None:
    """Makes the pieces of ``flat`` the gradients of the parameters that it was put together from."""
    pieces = torch.split(flat, [parameter.numel() for parameter in bucket])
    for parameter, piece in zip(bucket, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)

"""Data parallelism: spreads a plain model over the data-parallel axes and drives its gradients through a step.

The tensor, context and expert axes have left each rank with a smaller plain module by now, and the pipeline with one or
more parts of it (its stages). Two choices are left, and they combine freely:

- How a rank holds the weights: ``Sharded`` by FSDP2 (``fully_shard``), ZeRO-3 or, with weights kept after forward, ZeRO-2;
  replicas of the shards make it hybrid. Also used on a single rank when compute runs in a narrower format than the master
  weights, because FSDP2 makes the narrow copy. Or ``Whole``: every rank holds the module as it is, nothing to gather.
- How the slots' gradients are added: ``TreeSummation`` or ``FastSummation`` (``summation.py``), or ``IntegerSummation``.

The optimizer's step goes through its rounds (``mesh/slots.py``): ``begin(round)``, then forward and backward of the slot's
micro-batches, each backward pass through a part inside ``computing``, then ``end(round)``. In a pipeline a round begins before the
one ahead of it has ended, but through each part all backward passes of a round come before those of the next. After the
last round each parameter's ``grad`` is this rank's share of the sum (``gradients``), until ``abandon``.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.model.custom import blocks_of
from phalanx.model.layers.experts.expert_groups import add_slots
from phalanx.model.layers.experts.moe import Experts, MoE
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.mesh.torch_compat import finish_backward, give_gradient, measure_waits
from phalanx.parallel.reduction.integer_summation import IntegerSummation
from phalanx.parallel.reduction.reduce_scatter import TimedAllGather
from phalanx.parallel.reduction.summation import FastSummation, Summation, TreeSummation
from phalanx.run.spec import RunSpec

# The gradients of one layer's experts from the slots of a hand, which their ranks compute at once.
#
# Experts that several slots' tokens come to have a gradient for each slot: a leaf of the slots' tree. Autograd could deliver their sum in the
# weights' dtype alone, rounded, and FSDP2 would add the sums of micro-batches. So the leaves are taken out of the backward pass, and the
# sum goes to FSDP2 in fp32, the format in which it would have been added up by slots computed apart. What is added first, where a slot has several
# micro-batches, is a choice of the run (``train.expert_sums``):
#
# - ``"micro-batch"``: the slots of each micro-batch, and then these sums. One set of gradients is kept.
# - ``"slot"``: the micro-batches of each slot, and then the slots, as for all other weights. Then the sum is the same however many
#   slots a team computes at once, and so are the bits for every ``parallel.expert``. A set of gradients is kept for each slot of the
#   team, as many in all as a rank would keep that held the layer's experts alone.
#
# With one micro-batch to a slot there is nothing to choose, and nothing is kept.


class ExpertSums:
    """Adds up what a layer's experts get from the slots of a hand, and gives FSDP2 the sum.

    Args:
        give: Called with a parameter's name and the sum of a hand's slots, fp32, when it is complete.
        experts: The number of experts.
        by_slot: True if the micro-batches of each slot are added first.
    """

    def __init__(self, give: Callable[[str, Tensor], None], experts: int, *, by_slot: bool) -> None:
        self._give, self._experts, self._by_slot = give, experts, by_slot
        self.complete = False
        """True if the next backward pass completes the slots' gradients."""
        self._kept: dict[str, dict[int, Tensor]] = defaultdict(dict)
        """Sums over micro-batches, by parameter and the first of some experts: ``(experts, slots, ...)``, or without slots."""
        self._sums: dict[str, list[Tensor]] = defaultdict(list)
        """Sums of a parameter's first experts, while those of the others are still to come: ``(experts, ...)``, fp32."""

    def take(self, name: str, experts: range, leaves: Tensor) -> None:
        """Takes the gradients ``(experts, slots, ...)`` of a micro-batch of each slot, of some of a parameter's experts."""
        values, kept = leaves if self._by_slot else add_slots(leaves), self._kept[name]
        if experts.start in kept:
            kept[experts.start] += values
        else:
            kept[experts.start] = values if self.complete else values.float()
        if not self.complete:
            return
        self._complete(name, experts.start)
        if experts.stop == self._experts:
            self._give(name, _joined(self._sums.pop(name)))

    def finish(self) -> None:
        """Gives what was there before the backward pass that completes the slots, if it was that, where a schedule divides it."""
        if not self.complete:
            return
        for name, kept in self._kept.items():
            for first in sorted(kept):
                self._complete(name, first)
        for name in list(self._sums):
            self._give(name, _joined(self._sums.pop(name)))

    def clear(self) -> None:
        """Forgets what a step that was broken off has left."""
        self._kept.clear()
        self._sums.clear()

    def _complete(self, name: str, first: int) -> None:
        values = self._kept[name].pop(first)
        self._sums[name].append(add_slots(values) if self._by_slot else values)


def _joined(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def sums_of(experts: Experts, *, by_slot: bool) -> ExpertSums:
    """Takes the gradients of ``experts``, which FSDP2 has wrapped and which serve several slots at once, out of backward passes."""
    assert isinstance(experts, FSDPModule), "with several slots at once, several ranks share the weights"
    module = weakref.ref(experts)

    def give(name: str, total: Tensor) -> None:
        here = module()
        assert isinstance(here, FSDPModule), "a backward pass goes through it"
        give_gradient(here, name, total)

    sums = ExpertSums(give, len(experts.up), by_slot=by_slot)
    experts.take = sums.take
    return sums


class DataParallel(ABC):
    """A model spread over the data-parallel axes, and the sum of its slots' gradients.

    ``parts`` are the stages of the model that this rank holds; without a pipeline, the whole model is the only one.
    """

    def __init__(self, parts: Sequence[nn.Module], summation: Summation) -> None:
        self.parts, self.summation = parts, summation

    @property
    def mesh(self) -> Mesh:
        """The ranks' places."""
        return self.summation.mesh

    def begin(self, current: Round) -> None:  # noqa: B027  for what is to happen at a slot's beginning, such as faults
        """Called before the forward pass of a round's first micro-batch."""

    @contextmanager
    def computing(self, part: int, current: Round, *, last: bool, postponed: bool = False) -> Iterator[None]:
        """Encloses a backward pass of a round through a part, or the adding of weight gradients that were ``postponed``.

        With the ``last`` one, the gradient of the round's slot is complete in this part.
        """
        self.summation.intake.round = current
        self.before_backward(part, current, last=last)
        yield
        if postponed:
            self.after_weights(part)
        if last:
            self.close(part, current)

    @abstractmethod
    def before_backward(self, part: int, current: Round, *, last: bool) -> None:
        """Called before gradients of a part are computed."""

    @abstractmethod
    def after_weights(self, part: int) -> None:
        """Called when postponed weight gradients of a part were added, outside of any backward pass."""

    @abstractmethod
    def close(self, part: int, current: Round) -> None:
        """Called when the gradient of a round's slot is complete in a part."""

    @abstractmethod
    def end(self, current: Round) -> None:
        """Called when a round is closed in all parts."""

    def abandon(self) -> None:
        """Forgets all gradients, of a finished step or of one that was broken off."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        self.summation.clear()

    def loss_weight(self, current: Round) -> float:
        """The factor on a rank's loss: 0 where a result that does not count would be added."""
        return self.summation.loss_weight(current)


class Sharded(DataParallel):
    """FSDP2: each rank holds a share of every parameter group, and gets that share of the summed gradient."""

    def __init__(self, parts: Sequence[nn.Module], summation: Summation, *, keep_weights: bool) -> None:
        super().__init__(parts, summation)
        self._keep_weights = keep_weights
        self.expert_sums: list[list[ExpertSums]] = [[] for _ in parts]
        """Sums of the experts in each part that several slots' tokens come to at once."""
        # While weights are gathered the modules show the whole ones; these are the shares, whose gradients count.
        self._shares = [list(named_parameters([part]).values()) for part in parts]
        summation.reduce_groups(list(_fsdp_modules(parts)))

    def before_backward(self, part: int, current: Round, *, last: bool) -> None:
        root = cast(FSDPModule, self.parts[part])
        for sums in self.expert_sums[part]:
            sums.complete = last
        # A tree needs every slot alone. Else ZeRO-3 reduces after every slot too, while ZeRO-2, which has the memory for
        # whole gradients, does so once a step; sums over replicas wait for the last round.
        slot_by_slot = self.summation.slot_by_slot or not self._keep_weights
        root.set_requires_gradient_sync(last and (slot_by_slot or current.last))
        root.set_requires_all_reduce(self.summation.slot_by_slot or current.last)
        # ZeRO-2 gathers weights once a step: they change only after its last backward pass.
        root.set_reshard_after_backward((last and current.last) or not self._keep_weights)

    def after_weights(self, part: int) -> None:
        for sums in self.expert_sums[part]:
            sums.finish()
        finish_backward(cast(FSDPModule, self.parts[part]))

    def close(self, part: int, current: Round) -> None:
        if self.summation.slot_by_slot and not current.last:
            # The trees hold this round's gradients; what FSDP would accumulate means nothing yet.
            _drop(self._shares[part])

    def end(self, current: Round) -> None:
        """Nothing: FSDP has exchanged what there is."""

    def abandon(self) -> None:
        super().abandon()
        for shares in self._shares:
            _drop(shares)
        for sums in itertools.chain.from_iterable(self.expert_sums):
            sums.clear()


class Whole(DataParallel):
    """Every rank holds the module as it is; nothing is gathered, and only sums over replicas cross the network."""

    def __init__(self, parts: Sequence[nn.Module], summation: Summation) -> None:
        super().__init__(parts, summation)
        self._parameters = [list(named_parameters([part]).values()) for part in parts]
        summation.follow(named_parameters(parts))

    def before_backward(self, part: int, current: Round, *, last: bool) -> None:  # noqa: ARG002
        self.summation.intake.slot_complete = last
        if last:
            self.summation.add_to_siblings()

    def after_weights(self, part: int) -> None:
        """Nothing: ``close`` takes in what was added."""

    def close(self, part: int, current: Round) -> None:  # noqa: ARG002
        # What a split backward pass has accumulated without PyTorch's hooks noticing.
        self.summation.take_whole(self._parameters[part])

    def end(self, current: Round) -> None:
        if current.last:
            self.summation.sum_whole([parameter for part in self._parameters for parameter in part])


def _drop(shares: Sequence[nn.Parameter]) -> None:
    for share in shares:
        share.grad = None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of all parts, by name."""
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """This rank's part of every gradient, by name. Raises ``RuntimeError`` if a parameter has none."""
    shares = {}
    for name, parameter in named_parameters(parts).items():
        if parameter.grad is None:
            raise RuntimeError(f"{name} got no gradient: every parameter must take part in the loss")
        shares[name] = local(parameter.grad)
    return shares


def reshard(parts: Sequence[nn.Module]) -> None:
    """Gives up whole weights that a forward pass without a backward has left gathered (and narrow copies of them)."""
    for module in _fsdp_modules(parts):
        module.reshard()


def spread(parts: Sequence[nn.Module], mesh: Mesh, spec: RunSpec, clock: CommClock) -> DataParallel:
    """Spreads ``parts`` (on the meta device) over ``mesh`` as ``spec.parallel`` and ``spec.precision`` say.

    Afterwards every rank has memory for what it holds of the parameters, but nothing in it: a fill or a restore
    follows.
    """
    narrow = spec.precision.compute == "bf16"
    keep_weights = spec.parallel.sharding != "zero3"
    summation = _summation(spec, mesh, clock, narrow=narrow, keep_weights=keep_weights)
    experts_whole = spec.model.moe is None or mesh.layout.expert_shard == 1
    if mesh.fsdp_ranks == 1 and experts_whole and not narrow:
        for part in parts:
            part.to_empty(device=mesh.device)
        return Whole(parts, summation)
    for part in parts:
        _shard(part, mesh, narrow=narrow, by_slot=summation.slot_by_slot, keep_weights=keep_weights)
        part.to_empty(device=mesh.device)
    for module in _fsdp_modules(parts):
        if clock.blocking:
            module.set_custom_all_gather(TimedAllGather(clock))
        else:
            measure_waits(module, lambda: clock.measure())  # which a profile may replace
    model = Sharded(parts, summation, keep_weights=keep_weights)
    if summation.slot_by_slot and mesh.layout.team > 1:
        by_slot = spec.train.expert_sums == "slot"
        model.expert_sums = [
            [sums_of(module, by_slot=by_slot) for module in part.modules() if isinstance(module, Experts)]
            for part in parts
        ]
    return model


def _summation(spec: RunSpec, mesh: Mesh, clock: CommClock, *, narrow: bool, keep_weights: bool) -> Summation:
    if spec.train.reduction == "fast":
        return FastSummation(mesh, clock)
    deal = mesh.deal(spec.train.slots)
    if spec.train.reduction == "integer":
        reporters = mesh.layout.context if spec.model.context_tiles else 1
        return IntegerSummation(mesh, clock, deal, each_round=not keep_weights, reporters=reporters)
    return TreeSummation(mesh, clock, deal, _wire(spec, narrow=narrow))


def _wire(spec: RunSpec, *, narrow: bool) -> torch.dtype:
    """The narrowest dtype that loses nothing of a slot's gradient.

    Backward passes give gradients in the dtype of compute; FSDP2 adds those of several micro-batches in fp32, and those of a
    user's own parameter that is used both in a ``Linear`` and outside it, where a schedule puts weight gradients off.
    """
    sequences = spec.train.batch_size // spec.train.slots
    alone = (spec.train.micro_batch_size or sequences) >= sequences and not spec.model.factory
    return torch.bfloat16 if narrow and alone else torch.float32


def _shard(part: nn.Module, mesh: Mesh, *, narrow: bool, by_slot: bool, keep_weights: bool) -> None:
    """Wraps a part's experts, blocks, head and root, each a group of parameters that is gathered at once."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.float32,
        # The rotary tables are computed in fp32; the model casts where it wants to.
        cast_forward_inputs=False,
    )
    # What takes slots one by one sums over replicas itself.
    alone = by_slot or mesh.replicas == 1
    dense = mesh.dense["fsdp"] if alone else mesh.dense["replicate", "fsdp"]
    experts = mesh.expert_mesh["expert_shard"] if alone else mesh.expert_mesh["replicate", "expert_shard"]
    for block in blocks_of(part):
        if isinstance(block, Block) and isinstance(block.ffn, MoE):
            fully_shard(
                block.ffn.experts, mesh=experts, reshard_after_forward=not keep_weights, mp_policy=policy
            )
        fully_shard(block, mesh=dense, reshard_after_forward=not keep_weights, mp_policy=policy)
        if isinstance(block, Block) and isinstance(block.ffn, MoE):
            # Behind attention. Before the experts run the host waits for a GPU's counts of tokens, and what it launches after that
            # has nothing left to hide behind.
            experts_of = cast(FSDPModule, block.ffn.experts)
            cast(FSDPModule, block).set_modules_to_forward_prefetch([experts_of])
    if isinstance(part, Transformer) and part.head is not None and not part.mtp:
        # A unit of its own: its weights travel behind the last blocks' forward pass, its gradient behind their backward pass. Both are
        # needed one after the other, so it is kept between them.
        fully_shard(part.head, mesh=dense, reshard_after_forward=False, mp_policy=policy)
    # The root's weights (embedding, norm) are needed first, and last in the backward pass; they are small, or tied to the head: keep them.
    fully_shard(part, mesh=dense, reshard_after_forward=False, mp_policy=policy)


def _fsdp_modules(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    return (module for part in parts for module in part.modules() if isinstance(module, FSDPModule))

"""Data parallelism: distributes a plain model over the data-parallel axes and drives its gradients through a step.

The tensor, context and expert axes have already left each rank with a smaller plain module, and the pipeline with one or more parts
of it (its stages). Two independent choices remain:

- Weights are ``Sharded`` by FSDP2 (``fully_shard``), as ZeRO-3 or, with weights kept after forward, as ZeRO-2. With several replicas
  of the shards it is hybrid. A single rank uses it too if the compute dtype is narrower than the master weights, because FSDP2 makes
  the narrow copy. Or they are ``Unsharded``: every rank has the full module, and nothing is gathered.
- The slots' gradients are added by ``TreeSummation``, ``FastSummation`` (``summation.py``) or ``IntegerSummation``.

The optimizer's step calls, for each round (``divisions.py``): ``begin(round)``, then forward and backward of the slot's
micro-batches, each backward pass through a part inside ``computing``, then ``end(round)``. In a pipeline a round begins before the
previous one has ended, but each part runs all backward passes of a round before those of the next. After the last round each
parameter's ``grad`` is this rank's share of the sum (``gradients``), until ``abandon``.
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

from phalanx.hardware.local.device import CommClock
from phalanx.model.custom import blocks_of
from phalanx.model.layers.expert_groups import add_slots
from phalanx.model.layers.moe import Experts, MoE
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.divisions import Round
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.reduction.integer_summation import IntegerSummation
from phalanx.parallel.reduction.reduce_scatter import TimedAllGather
from phalanx.parallel.reduction.summation import FastSummation, Summation, TreeSummation
from phalanx.parallel.torch_compat import finish_backward, measure_waits, set_gradient
from phalanx.run.spec import RunSpec

# The gradients of one layer's experts from the slots of a hand, which a team computes at once.
#
# Experts that process the tokens of several slots have one gradient for each slot: a leaf of the slots' tree. Autograd would deliver
# only their sum, rounded to the weights' dtype, and FSDP2 would add the sums of micro-batches. So the leaves are taken out of the
# backward pass, and the sum is passed to FSDP2 in fp32, as if the slots had been computed separately. If a slot has several
# micro-batches, the run selects the order of summation (``train.expert_sums``):
#
# - ``"micro-batch"``: add the slots of each micro-batch, and then these sums. One set of gradients is kept.
# - ``"slot"``: add the micro-batches of each slot, and then the slots, as for all other weights. The sum, and so the bits, are the
#   same for every ``parallel.expert``. One set of gradients is kept for each slot of the team. In total that is as many as a rank
#   with all of the layer's experts would keep.
#
# With one micro-batch per slot both are the same, and nothing is kept.


class ExpertSums:
    """Adds up the gradients of a layer's experts over the slots of a hand, and passes the sum to FSDP2.

    Args:
        set_grad: Called with a parameter's name and the complete sum over a hand's slots, fp32.
        experts: Number of experts.
        by_slot: True if the micro-batches of each slot are added first.
    """

    def __init__(self, set_grad: Callable[[str, Tensor], None], experts: int, *, by_slot: bool) -> None:
        """Start without gradients. ``set_grad`` receives a parameter's name and its complete gradient, once all
        ``experts`` have theirs. ``by_slot`` keeps the slots apart over micro-batches.
        """
        self._set_grad, self._experts, self._by_slot = set_grad, experts, by_slot
        self.complete = False
        """True if the next backward pass completes the slots' gradients."""
        self._partial: dict[str, dict[int, Tensor]] = defaultdict(dict)
        """Sums over micro-batches, by parameter and first expert: ``(experts, slots, ...)``, or without slots."""
        self._sums: dict[str, list[Tensor]] = defaultdict(list)
        """Complete sums of a parameter's first experts, until those of the others follow: ``(experts, ...)``, fp32."""

    def take(self, name: str, experts: range, leaves: Tensor) -> None:
        """Add the gradients ``(experts, slots, ...)`` of one micro-batch of each slot, for ``experts`` of a
        parameter, to their partial sums.

        If this completes the slots, sum them; with the last experts, set the parameter's gradient.
        """
        values, partial = leaves if self._by_slot else add_slots(leaves), self._partial[name]
        if experts.start in partial:
            partial[experts.start] += values
        else:
            partial[experts.start] = values if self.complete else values.float()
        if not self.complete:
            return
        self._complete(name, experts.start)
        if experts.stop == self._experts:
            self._set_grad(name, _joined(self._sums.pop(name)))

    def finish(self) -> None:
        """Pass on all partial sums after postponed weight gradients, if these complete the slots."""
        if not self.complete:
            return
        for name, partial in self._partial.items():
            for first in sorted(partial):
                self._complete(name, first)
        for name in list(self._sums):
            self._set_grad(name, _joined(self._sums.pop(name)))

    def clear(self) -> None:
        """Discard the sums of an aborted step."""
        self._partial.clear()
        self._sums.clear()

    def _complete(self, name: str, first: int) -> None:
        """Move the gradients of the slots from ``first`` on to the sums, added up if each slot counts by itself."""
        values = self._partial[name].pop(first)
        self._sums[name].append(add_slots(values) if self._by_slot else values)


def _joined(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.cat(sums)  # (experts, ...)


def sums_of(experts: Experts, *, by_slot: bool) -> ExpertSums:
    """Replace the gradient intake of ``experts``, which FSDP2 has wrapped and which process several slots at once:
    their gradients are added slot by slot and then set as FSDP's unsharded ones. Return the sums.
    """
    assert isinstance(experts, FSDPModule), "with several slots at once, several ranks share the weights"
    module = weakref.ref(experts)

    def set_grad(name: str, total: Tensor) -> None:
        target = module()
        assert isinstance(target, FSDPModule), "the module exists during its backward pass"
        set_gradient(target, name, total)

    sums = ExpertSums(set_grad, len(experts.up), by_slot=by_slot)
    experts.take = sums.take
    return sums


class DataParallel(ABC):
    """A model distributed over the data-parallel axes, and the sum of its slots' gradients.

    ``parts`` are the stages of the model on this rank; without a pipeline, the full model is the only one.
    """

    def __init__(self, parts: Sequence[nn.Module], summation: Summation) -> None:
        self.parts, self.summation = parts, summation

    @property
    def mesh(self) -> Mesh:
        """The mesh of the model."""
        return self.summation.mesh

    def begin(self, current: Round) -> None:  # noqa: B027  a hook, for example for injected faults
        """Hook before the forward pass of a round's first micro-batch."""

    @contextmanager
    def computing(self, part: int, current: Round, *, last: bool, postponed: bool = False) -> Iterator[None]:
        """Context of a backward pass of a round through a part, or of adding ``postponed`` weight gradients.

        The one with ``last`` completes the gradient of the round's slot in this part. Afterwards hooks add the
        gradients to the sums.
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
        """Hook before gradients of a part are computed."""

    def after_weights(self, part: int) -> None:  # noqa: B027
        """Hook after postponed weight gradients of a part were added, outside of any backward pass."""

    @abstractmethod
    def close(self, part: int, current: Round) -> None:
        """Hook after the gradient of a round's slot is complete in a part."""

    def end(self, current: Round) -> None:  # noqa: B027
        """Hook after a round is closed in all parts."""

    def abandon(self) -> None:
        """Discard all gradients, of a finished or an aborted step."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        self.summation.clear()


class Sharded(DataParallel):
    """FSDP2: each rank has a share of every parameter group, and receives that share of the summed gradient."""

    def __init__(self, parts: Sequence[nn.Module], summation: Summation, *, keep_weights: bool) -> None:
        """Install ``summation`` on all FSDP units of ``parts``. ``keep_weights``: weights stay gathered within a step."""
        super().__init__(parts, summation)
        self._keep_weights = keep_weights
        self.expert_sums: list[list[ExpertSums]] = [[] for _ in parts]
        """For each part, the sums of experts that process several slots at once."""
        # While weights are gathered the modules have the full ones; these are the shares, whose gradients count.
        self._shares = [list(named_parameters([part]).values()) for part in parts]
        summation.reduce_groups(list(_fsdp_modules(parts)))

    def before_backward(self, part: int, current: Round, *, last: bool) -> None:
        """Set FSDP's flags for this pass: whether to reduce gradients, over replicas too, and whether to free the
        weights afterwards. Mark the experts' sums as complete after the ``last`` pass.
        """
        root = cast(FSDPModule, self.parts[part])
        for sums in self.expert_sums[part]:
            sums.complete = last
        # A tree needs every slot separately. Otherwise ZeRO-3 also reduces after every slot. ZeRO-2 has memory for full gradients
        # and reduces once per step. Sums over replicas wait for the last round.
        slot_by_slot = self.summation.slot_by_slot or not self._keep_weights
        root.set_requires_gradient_sync(last and (slot_by_slot or current.last))
        root.set_requires_all_reduce(self.summation.slot_by_slot or current.last)
        # ZeRO-2 gathers weights once per step: they change only after its last backward pass.
        root.set_reshard_after_backward((last and current.last) or not self._keep_weights)

    def after_weights(self, part: int) -> None:
        """Finish the experts' sums and the backward pass of a part."""
        for sums in self.expert_sums[part]:
            sums.finish()
        finish_backward(cast(FSDPModule, self.parts[part]))

    def close(self, part: int, current: Round) -> None:
        """Drop the gradients of a part's shares, unless the round is the last."""
        if self.summation.slot_by_slot and not current.last:
            # The trees have this round's gradients; the output that FSDP would accumulate is meaningless until the last round.
            _drop(self._shares[part])

    def abandon(self) -> None:
        """Drop all gradients and partial sums of the step."""
        super().abandon()
        for shares in self._shares:
            _drop(shares)
        for sums in itertools.chain.from_iterable(self.expert_sums):
            sums.clear()


class Unsharded(DataParallel):
    """Every rank has the full module; nothing is gathered, and only sums over replicas cross the network."""

    def __init__(self, parts: Sequence[nn.Module], summation: Summation) -> None:
        super().__init__(parts, summation)
        self._parameters = [list(named_parameters([part]).values()) for part in parts]
        summation.follow(named_parameters(parts))

    def before_backward(self, part: int, current: Round, *, last: bool) -> None:  # noqa: ARG002
        """Note whether the slot is complete after this pass; before the last one, add to the sibling's gradients."""
        self.summation.intake.slot_complete = last
        if last:
            self.summation.add_to_siblings()

    def close(self, part: int, current: Round) -> None:  # noqa: ARG002
        # A split backward pass accumulates some gradients without calling PyTorch's hooks.
        self.summation.take_whole(self._parameters[part])

    def end(self, current: Round) -> None:
        """After the last round, sum all gradients over the slots and replicas."""
        if current.last:
            self.summation.sum_whole([parameter for part in self._parameters for parameter in part])


def _drop(shares: Sequence[nn.Parameter]) -> None:
    """Set the gradients of ``shares`` to None."""
    for share in shares:
        share.grad = None


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all parts, by name."""
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's part of every gradient, by name; views, not copies. Raise ``RuntimeError`` if a parameter has none."""
    shares = {}
    for name, parameter in named_parameters(parts).items():
        if parameter.grad is None:
            raise RuntimeError(f"{name} got no gradient: every parameter must take part in the loss")
        shares[name] = local(parameter.grad)
    return shares


def reshard(parts: Sequence[nn.Module]) -> None:
    """Free full weights that a forward pass without backward has left gathered, and narrow copies of them."""
    for module in _fsdp_modules(parts):
        module.reshard()


def spread(parts: Sequence[nn.Module], mesh: Mesh, spec: RunSpec, clock: CommClock) -> DataParallel:
    """Distribute ``parts`` (on the meta device) over ``mesh`` by ``spec.parallel`` and ``spec.precision``.

    Afterwards every rank has allocated its share of the parameters, uninitialized: initialization or a restore follows.
    """
    narrow = spec.precision.compute == "bf16"
    keep_weights = spec.parallel.sharding != "zero3"
    summation = _summation(spec, mesh, clock, narrow=narrow, keep_weights=keep_weights)
    experts_whole = spec.model.moe is None or mesh.layout.expert_shard == 1
    if mesh.fsdp_ranks == 1 and experts_whole and not narrow:
        for part in parts:
            part.to_empty(device=mesh.device)
        return Unsharded(parts, summation)
    for part in parts:
        _shard(part, mesh, narrow=narrow, by_slot=summation.slot_by_slot, keep_weights=keep_weights)
        part.to_empty(device=mesh.device)
    for module in _fsdp_modules(parts):
        if clock.blocking:
            module.set_custom_all_gather(TimedAllGather(clock))
        else:
            measure_waits(module, lambda: clock.measure())  # looked up late, because a profile may replace it
    model = Sharded(parts, summation, keep_weights=keep_weights)
    if summation.slot_by_slot and mesh.layout.team > 1:
        by_slot = spec.train.expert_sums == "slot"
        model.expert_sums = [
            [sums_of(module, by_slot=by_slot) for module in part.modules() if isinstance(module, Experts)]
            for part in parts
        ]
    return model


def _summation(spec: RunSpec, mesh: Mesh, clock: CommClock, *, narrow: bool, keep_weights: bool) -> Summation:
    """Return the summation that ``train.reduction`` selects: fast, integer or tree."""
    if spec.train.reduction == "fast":
        return FastSummation(mesh, clock)
    deal = mesh.deal(spec.train.slots)
    if spec.train.reduction == "integer":
        reporters = mesh.layout.context if spec.model.context_tiles else 1
        return IntegerSummation(mesh, clock, deal, each_round=not keep_weights, reporters=reporters)
    return TreeSummation(mesh, clock, deal, _wire(spec, narrow=narrow))


def _wire(spec: RunSpec, *, narrow: bool) -> torch.dtype:
    """Return the narrowest dtype that represents a slot's gradient exactly.

    Backward passes give gradients in the compute dtype. FSDP2 adds those of several micro-batches in fp32. It does the same for a user's
    parameter that is used both in a ``Linear`` and outside it, if a schedule postpones weight gradients.
    """
    sequences = spec.train.batch_size // spec.train.slots
    is_single_backward = (spec.train.micro_batch_size or sequences) >= sequences and not spec.model.factory
    return torch.bfloat16 if narrow and is_single_backward else torch.float32


def _shard(part: nn.Module, mesh: Mesh, *, narrow: bool, by_slot: bool, keep_weights: bool) -> None:
    """Wrap a part's experts, blocks, head and root with FSDP2, each as one unit. ``narrow`` computes in bf16;
    ``by_slot`` leaves replicas to the summation; ``keep_weights`` does not free weights after forward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.float32,
        # The rotary tables are fp32; the model does its own casts.
        cast_forward_inputs=False,
    )
    # A summation that takes slots one by one sums over replicas itself.
    no_replicas = by_slot or mesh.replicas == 1
    dense = mesh.dense["fsdp"] if no_replicas else mesh.dense["replicate", "fsdp"]
    experts = (
        mesh.expert_mesh["expert_shard"] if no_replicas else mesh.expert_mesh["replicate", "expert_shard"]
    )
    for block in blocks_of(part):
        if isinstance(block, Block) and isinstance(block.ffn, MoE):
            fully_shard(
                block.ffn.experts, mesh=experts, reshard_after_forward=not keep_weights, mp_policy=policy
            )
        fully_shard(block, mesh=dense, reshard_after_forward=not keep_weights, mp_policy=policy)
        if isinstance(block, Block) and isinstance(block.ffn, MoE):
            # Prefetch during attention. Before the experts run, the host waits for the GPU's counts of tokens, and a gather launched
            # after that would overlap with nothing.
            experts_of = cast(FSDPModule, block.ffn.experts)
            cast(FSDPModule, block).set_modules_to_forward_prefetch([experts_of])
    if isinstance(part, Transformer) and part.head is not None and not part.mtp:
        # A separate unit: its gather overlaps with the last blocks' forward pass, its reduction with their backward pass. Its forward
        # and backward follow each other, so it stays gathered between them.
        fully_shard(part.head, mesh=dense, reshard_after_forward=False, mp_policy=policy)
    # The root's weights (embedding, norm) are needed first in forward and last in backward. They are small, or tied to the head, so
    # they stay gathered.
    fully_shard(part, mesh=dense, reshard_after_forward=False, mp_policy=policy)


def _fsdp_modules(parts: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    return (module for part in parts for module in part.modules() if isinstance(module, FSDPModule))

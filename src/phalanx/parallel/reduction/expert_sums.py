"""The gradients of one layer's experts from the slots of a hand, which their ranks compute at once.

Experts that several slots' tokens come to have a gradient for each slot: a leaf of the slots' tree. Autograd could deliver their sum in the
weights' dtype alone, rounded, and FSDP2 would add the sums of micro-batches. So the leaves are taken out of the backward pass, and the
sum goes to FSDP2 in fp32, the format in which it would have been added up by slots computed apart. What is added first, where a slot has several
micro-batches, is a choice of the run (``train.expert_sums``):

- ``"micro-batch"``: the slots of each micro-batch, and then these sums. One set of gradients is kept.
- ``"slot"``: the micro-batches of each slot, and then the slots, as for all other weights. Then the sum is the same however many
  slots a team computes at once, and so are the bits for every ``parallel.expert``. A set of gradients is kept for each slot of the
  team, as many in all as a rank would keep that held the layer's experts alone.

With one micro-batch to a slot there is nothing to choose, and nothing is kept.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.model.layers.experts.expert_groups import add_slots
from phalanx.model.layers.experts.moe import Experts
from phalanx.parallel.mesh.torch_compat import give_gradient


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

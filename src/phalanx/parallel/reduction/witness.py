"""A witness of slots' gradients: takes their checksums just before they enter the tree of all slots.

A slot's gradient is complete on a rank as the input of each parameter group's reduce-scatter (a sharded model), or parameter by
parameter (a whole one). There the witness is put, once, by ``attach``. In a round that it watches it takes checksums on the way; in
an *extra round*, in which a rank computes another team's slot to check it, it also keeps the gradient out of the tree, so
that the step's sum is what it would be without. An extra round comes before the step's own rounds: FSDP drops what it makes of
it as it does after every round but the last. All ranks of a replica run it together, because weights are gathered in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.model.layers.moe import Experts
from phalanx.parallel.mesh.slots import SlotTree
from phalanx.parallel.reduction.checksum import named_checksum, total_checksum
from phalanx.parallel.reduction.data_parallel import (
    DataParallel,
    Round,
    ShardedByTree,
    WholeByTree,
    named_parameters,
)
from phalanx.parallel.reduction.tree import TreeReducer, TreeReduceScatter


class NotWitnessedError(ValueError):
    """A model whose slots' gradients are not to be seen one by one."""


@dataclass
class Witness:
    """Sees the gradients of a slot as they become complete."""

    watching: bool = False
    extra: bool = False
    sums: list[Tensor] = field(default_factory=list)
    """Checksums, of parameters or of parameter groups; they wait on the device until they are taken."""
    corrupt: Callable[[Tensor], None] | None = None
    """Damages a gradient in place before anybody sees it: a fault on demand."""

    def see(self, name: str, gradient: Tensor) -> None:
        """Takes note of a gradient that is about to enter its tree."""
        if self.corrupt is not None:
            self.corrupt(gradient)
        if self.watching:
            self.sums.append(named_checksum(name, gradient))

    @contextmanager
    def watch(self, *, extra: bool = False) -> Iterator[None]:
        """Watches the round inside the ``with``."""
        self.watching, self.extra, self.sums = True, extra, []
        try:
            yield
        finally:
            self.watching = self.extra = False

    def take(self) -> int:
        """The checksum of the slot that was watched last."""
        total, self.sums = total_checksum(self.sums), []
        return total


def extra_round(slots: tuple[int, ...], shard_rank: int) -> Round:
    """A round in which the shard ranks of a replica compute ``slots`` only to check them."""
    return Round(slots, slots[shard_rank], counts=False, last=False)


def attach(model: DataParallel) -> Witness:
    """Puts a witness into ``model``; bits stay as they are. Raises ``NotWitnessedError`` if it cannot see slots."""
    witness = Witness()
    if isinstance(model, ShardedByTree):
        _attach_sharded(model, witness)
    elif isinstance(model, WholeByTree):
        for name, parameter in named_parameters(model.parts).items():
            tree = model._trees[parameter]
            model._trees[parameter] = _WitnessedTree(tree.slots, tree.add, name=name, witness=witness)
    else:
        raise NotWitnessedError(
            'slots are summed before they can be told apart: set train.reduction = "reproducible" to audit them'
        )
    return witness


def _attach_sharded(model: ShardedByTree, witness: Witness) -> None:
    mesh, modules = (
        model.mesh,
        [m for part in model.parts for m in part.modules() if isinstance(m, FSDPModule)],
    )
    for number, (module, reducer) in enumerate(zip(modules, model._reducers, strict=True)):
        ranks = mesh.layout.expert_shard if isinstance(module, Experts) else mesh.fsdp_ranks
        if ranks > 1:
            module.set_custom_reduce_scatter(_Witnessed(reducer, model, str(number), witness))
        else:
            module.set_all_reduce_hook(_witnessed_hook(reducer, str(number), witness))


class _Witnessed(TreeReduceScatter):
    """The reduce-scatter of a parameter group, with a witness before it."""

    def __init__(self, reducer: TreeReducer, model: ShardedByTree, name: str, witness: Witness) -> None:
        super().__init__(reducer, model.clock)
        self._name, self._witness = name, witness

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self._witness.see(self._name, input_tensor)
        if self._witness.extra:
            output_tensor.zero_()
        else:
            super().__call__(output_tensor, input_tensor, group, op, async_op)


def _witnessed_hook(reducer: TreeReducer, name: str, witness: Witness) -> Callable[[Tensor], None]:
    """What ``ShardedByTree`` does with the gradient of a lone rank, with a witness before it."""

    def hook(gradient: Tensor) -> None:
        witness.see(name, gradient)
        if witness.extra:
            return
        reducer.push(gradient.clone().unsqueeze(0))
        if reducer.step.last_round:
            reducer.finish(gradient)

    return hook


@dataclass
class _WitnessedTree(SlotTree[Tensor]):
    """The tree of one parameter of a whole model, with a witness before it."""

    name: str = ""
    witness: Witness = field(default_factory=Witness)

    def push(self, slot: int, value: Tensor) -> None:
        self.witness.see(self.name, value)
        if not self.witness.extra:
            super().push(slot, value)

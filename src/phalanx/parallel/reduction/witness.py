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

from torch import Tensor

from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.reduction.checksum import named_checksum, total_checksum
from phalanx.parallel.reduction.data_parallel import DataParallel


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

    def see(self, name: str, gradient: Tensor) -> bool:
        """Takes note of a gradient that is about to enter its tree; ``False`` keeps it out, in an extra round."""
        if self.corrupt is not None:
            self.corrupt(gradient)
        if self.watching:
            self.sums.append(named_checksum(name, gradient))
        return not self.extra

    @contextmanager
    def watch(self, *, extra: bool = False) -> Iterator[None]:
        """Watches a round, or a part of it, inside the ``with``."""
        self.watching, self.extra = True, extra
        try:
            yield
        finally:
            self.watching = self.extra = False

    def take(self) -> int:
        """The checksum of what was watched since this was last asked for."""
        total, self.sums = total_checksum(self.sums), []
        return total


def extra_round(slots: tuple[int, ...], shard_rank: int) -> Round:
    """A round in which the shard ranks of a replica compute ``slots`` only to check them."""
    return Round(slots, slots[shard_rank], counts=False, last=False)


def attach(model: DataParallel) -> Witness:
    """Puts a witness into ``model``; bits stay as they are. Raises ``NotWitnessedError`` if it cannot see slots."""
    if not model.summation.slot_by_slot:
        raise NotWitnessedError(
            'slots are summed before they can be told apart: set train.reduction = "reproducible" or "integer" to audit them'
        )
    witness = Witness()
    model.summation.intake.admit = witness.see
    return witness

"""Slots: pieces of a global batch, and their assignment to ranks and rounds.

The run file divides a batch into slots. A slot's content, random numbers and position in the sum belong to the run; the
data-parallel rank that computes it belongs to the fleet. The sum over slots is in ``reduction/slot_tree.py``. All functions here
work on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Deal:
    """Assignment of slots to ranks, round by round.

    The data-parallel ranks of one replica (one copy of the weights) work in rounds. In each round every rank computes one slot, and the
    gradients are exchanged. A replica's slots are contiguous, so that it can add nearly all of its own before anything crosses to
    another. Ranks that share experts are a team: they get ``team`` slots together.

    With ``contiguous``, each rank's slots are contiguous too, and it can add them before anything crosses to another rank. Then
    ``team`` is 1.
    """

    slots: int
    replicas: int
    shard_ranks: int
    team: int = 1
    contiguous: bool = False

    def hands_of_replica(self, replica: int) -> range:
        """Return the contiguous hands (a team's slots in one round) of one replica; sizes differ by at most one."""
        hands = self.slots // self.team
        return range(replica * hands // self.replicas, (replica + 1) * hands // self.replicas)

    def rounds(self, replica: int) -> list[tuple[int | None, ...]]:
        """For each round, the slot of each shard rank; ``None`` after the last slot."""
        hands = self.hands_of_replica(replica)
        slots = range(hands.start * self.team, hands.stop * self.team)  # of this replica
        width = self.shard_ranks
        if self.contiguous:
            runs = [self.slots_of_rank(replica, rank) for rank in range(width)]
            return [
                tuple(run[number] if number < len(run) else None for run in runs)
                for number in range(len(runs[0]))
            ]
        return [
            tuple(slots[first + i] if first + i < len(slots) else None for i in range(width))
            for first in range(0, len(slots), width)
        ]

    def slots_of_rank(self, replica: int, shard_rank: int) -> range:
        """Return the slots of one rank of a contiguous deal. Sizes differ by at most one; rank 0 has the most."""
        slots, width = self.hands_of_replica(replica), self.shard_ranks
        return slots[-(-shard_rank * len(slots) // width) : -(-(shard_rank + 1) * len(slots) // width)]

    @property
    def most_rounds(self) -> int:
        """Largest number of slots that a rank computes in a step."""
        longest = max(self.hands_of_replica(0), self.hands_of_replica(self.replicas - 1), key=len)
        return -(-len(longest) * self.team // self.shard_ranks)


@dataclass(frozen=True)
class Round:
    """One round of a step: the slots that all shard ranks of this replica compute at the same time."""

    slots: tuple[int | None, ...]
    slot: int
    """The slot that this rank computes: its own or, if it has none, a neighbor's, whose result is dropped."""
    counts: bool
    """True if this rank's result enters the sum."""
    last: bool
    """True for the last round of a step."""

    @cached_property
    def assigned(self) -> int:
        """Number of ranks with a slot of their own."""
        return sum(slot is not None for slot in self.slots)


def rounds_of(deal: Deal, replica: int, shard_rank: int) -> list[Round]:
    """List the rounds of one rank in a step.

    A team without slots computes those of the round's first team again. The collectives inside forward and backward need all ranks.
    """
    all_rounds = deal.rounds(replica)
    rounds = []
    for number, slots in enumerate(all_rounds):
        own_slot, stand_in = slots[shard_rank], slots[shard_rank % deal.team]
        assert stand_in is not None, "a round begins with a team's slots"
        last = number == len(all_rounds) - 1
        rounds.append(Round(slots, stand_in if own_slot is None else own_slot, own_slot is not None, last))
    return rounds

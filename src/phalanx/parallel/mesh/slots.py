"""Slots: the pieces of a global batch, and which rank computes which of them in which round.

A batch is divided into slots by the run file. What a slot holds, its random numbers and its place in the sum belong to the
run; which data-parallel rank computes it belongs to the fleet. The sum over slots is ``reduction/slot_tree.py``. Everything
here is a function on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Deal:
    """The assignment of slots to ranks, round by round.

    The data-parallel ranks of one replica (those that share one copy of the weights) work in rounds: in each round every
    one of them computes one slot, and their gradients are exchanged. The replicas' slots are contiguous, so that a replica
    can add nearly all of its own before anything crosses to another. Ranks that share experts are a team: they are dealt
    slots together, ``team`` at a time.
    """

    slots: int
    replicas: int
    shard_ranks: int
    team: int = 1

    def hands_of_replica(self, replica: int) -> range:
        """The contiguous hands (a team's slots in one round) of one replica; sizes differ by at most one."""
        hands = self.slots // self.team
        return range(replica * hands // self.replicas, (replica + 1) * hands // self.replicas)

    def rounds(self, replica: int) -> list[tuple[int | None, ...]]:
        """For each round, the slot of each shard rank; ``None`` where the slots have run out."""
        hands = self.hands_of_replica(replica)
        mine = range(hands.start * self.team, hands.stop * self.team)
        width = self.shard_ranks
        return [
            tuple(mine[first + i] if first + i < len(mine) else None for i in range(width))
            for first in range(0, len(mine), width)
        ]

    @property
    def most_rounds(self) -> int:
        """The largest number of slots that a rank computes in a step."""
        longest = max(self.hands_of_replica(0), self.hands_of_replica(self.replicas - 1), key=len)
        return -(-len(longest) * self.team // self.shard_ranks)


@dataclass(frozen=True)
class Round:
    """One round of a step: what every shard rank of this replica computes at the same time."""

    slots: tuple[int | None, ...]
    slot: int
    """The slot that this rank computes: its own or, if it has none, a neighbor's, whose result is dropped."""
    counts: bool
    """True if this rank's result counts."""
    last: bool
    """True for the last round of a step."""

    @cached_property
    def dealt(self) -> int:
        """Number of ranks that have a slot of their own."""
        return sum(slot is not None for slot in self.slots)


def rounds_of(deal: Deal, replica: int, shard_rank: int) -> list[Round]:
    """The rounds of one rank in a step.

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

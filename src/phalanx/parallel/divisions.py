"""Divisions of a batch, a tensor and a step's gradients, on integers alone, without torch.

The run file divides a batch into *slots*, pieces that are assigned to ranks and rounds. A slot's content, random numbers and position in the sum belong to the run; the
data-parallel rank that computes it belongs to the fleet. The sum over slots is in ``reduction/tree.py``. A tensor is
divided into rectangular slices, and gradients into *buckets* and *spans*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

# Rectangular slices of a tensor: their position, their intersection, and their index in an array.
#
# They describe a rank's part of a parameter (``Partition``), the slices that an optimizer exchanges, and those in a checkpoint.
# (``Box`` adds the tensor's name, dtype and full shape.)


class LocalSlice(NamedTuple):
    """A slice of a tensor that begins at ``offset`` and extends over ``shape``, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def intersection(first: LocalSlice, second: LocalSlice) -> LocalSlice | None:
    """Return the elements in both slices of one tensor, or ``None`` if there are none."""
    (begin, size), (other_begin, other_size) = first, second
    starts = tuple(map(max, begin, other_begin))
    stops = (min(a + m, b + n) for a, m, b, n in zip(begin, size, other_begin, other_size, strict=True))
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return LocalSlice(starts, shape) if all(extent > 0 for extent in shape) else None


def slices_in(part: LocalSlice, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of ``part`` in an array whose first element is at ``origin`` of the tensor."""
    return tuple(
        slice(start - zero, start - zero + size) for start, size, zero in zip(*part, origin, strict=True)
    )


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
        """Return the rounds of ``replica``: for each, the slot of each shard rank, ``None`` if it has none left. With
        ``contiguous``, a rank has consecutive slots; otherwise they are dealt in turn.
        """
        hands = self.hands_of_replica(replica)
        slots = range(hands.start * self.team, hands.stop * self.team)  # this replica's
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
        most_hands = self.hands_of_replica(self.replicas - 1)  # the last replica has the most
        return -(-len(most_hands) * self.team // self.shard_ranks)


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


# Buckets and spans: the division of gradients for their exchange and for integer sums.
#
# A bucket has small gradients that are exchanged together, so that each exchange is large enough to fill a link.

BUCKET_ELEMENTS = 8 << 20
"""Elements that fill a bucket: 32 MiB in fp32, enough to saturate any link."""
T = TypeVar("T")


def in_buckets(items: Iterable[T], elements: Callable[[T], int]) -> Iterator[list[T]]:
    """Group ``items`` in their order; each group but the last has at least ``BUCKET_ELEMENTS`` elements."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        bucket.append(item)
        filled += elements(item)
        if filled >= BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


# Spans: consecutive elements of a parameter's row, which share one exponent in an integer sum (``reduction/reproducible_sums.py``).
#
# A span must be the same on every fleet, so it must not cross a boundary at which any fleet cuts. FSDP2 gives each rank complete rows
# (indices of the first dimension). So rows are divided into spans of equal length: the largest power of two that divides the row, at
# most 128. A vector's rows are single elements.
#
# FSDP2 passes a group's gradients by shares: each rank's rows of every parameter of the group, concatenated and padded with rows of
# zeros to the same length on all ranks. A layout has the positions of the spans in a share.


LONGEST_SPAN = 128
"""Maximum number of elements in a span. The exponent then adds less than a hundredth to the bytes."""
_LARGEST_INT32_COUNT = 1024
"""With more summands than this, the carries would leave too few of a word's 32 bits for digits."""


def word_bytes(count: int) -> int:
    """Return the bytes of each of an element's two words, in sums of ``count`` numbers."""
    return 4 if count <= _LARGEST_INT32_COUNT else 8


@dataclass(frozen=True)
class SpanSegment:
    """Consecutive spans of one size in a share."""

    first_element: int
    first_span: int
    spans: int
    size: int
    """Elements of each span."""


@dataclass(frozen=True)
class SpanLayout:
    """Positions of the spans in a share of one or more parameters."""

    segments: tuple[SpanSegment, ...]

    @property
    def elements(self) -> int:
        """Number of elements in a share."""
        return sum(segment.spans * segment.size for segment in self.segments)

    @property
    def spans(self) -> int:
        """Number of spans in a share."""
        return sum(segment.spans for segment in self.segments)


def span_size(shape: Sequence[int]) -> int:
    """Return the number of elements in each span of a parameter of ``shape``."""
    return math.gcd(math.prod(shape[1:]), LONGEST_SPAN)


def share_layout(shapes: Iterable[Sequence[int]], ranks: int) -> SpanLayout:
    """Return the spans of a rank's share of parameters of ``shapes``, one behind the other, divided by rows over
    ``ranks``.

    Rows are rounded up; consecutive parameters with one span size form a segment. Empty parameters are left out.
    """
    segments: list[SpanSegment] = []
    element = span = 0
    for shape in shapes:
        size, rows = span_size(shape), -(-(shape[0] if shape else 1) // ranks)
        spans = rows * math.prod(shape[1:]) // size
        if segments and segments[-1].size == size:
            last = segments.pop()
            segments.append(SpanSegment(last.first_element, last.first_span, last.spans + spans, size))
        elif spans:
            segments.append(SpanSegment(element, span, spans, size))
        element, span = element + spans * size, span + spans
    return SpanLayout(tuple(segments))

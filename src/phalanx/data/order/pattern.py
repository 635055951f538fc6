"""Whole weights of the sources of a mixture, and the pattern in which they take turns.

Drawing a source at random for each sample meets the asked proportions only on average: after n samples a source is off by some
sqrt(n). Here sources take turns in a fixed pattern of W positions, repeated for ever, in which every prefix of p positions has each
source of weight w within one sample of its exact share p w / W. Such a pattern is a schedule of one processor that is fair in the sense
of Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress" (Algorithmica 15, 1996); Tijdeman's chairman assignment problem (Discrete
Mathematics 32, 1980) is the same question. Item i of a source may be served from position floor(i W / w) on and before position
ceil((i + 1) W / w); serving whichever of the waiting items is due first meets all of these windows.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

LONGEST_PATTERN = 1 << 20
"""Positions of a pattern, at most; a table of so many takes 10 MiB and about two seconds to make."""
MOST_SOURCES = 1 << 16


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportions of ``weights``, taken as the decimals that they are written as: 0.1 is one tenth.

    The smallest such numbers, where their sum is at most ``LONGEST_PATTERN``. Otherwise ``LONGEST_PATTERN`` is apportioned by largest
    remainders, and nobody who has a weight is left without. Raises ``ValueError`` for a weight that is negative or not finite, and if
    none is positive.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights {list(weights)} are not all finite and at least 0")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise ValueError(f"of the weights {list(weights)} none is positive")
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    smallest = tuple(weight // divisor for weight in whole)
    return (
        smallest
        if sum(smallest) <= LONGEST_PATTERN
        else _apportioned([weight / total for weight in exact], LONGEST_PATTERN)
    )


def _apportioned(shares: Sequence[Fraction], seats: int) -> tuple[int, ...]:
    """``seats`` divided by largest remainders (Hamilton's method), at least one for each positive share."""
    quotas = [share * seats for share in shares]
    given = [max(1, math.floor(quota)) if quota else 0 for quota in quotas]
    by_need = sorted(range(len(quotas)), key=lambda place: given[place] - quotas[place])
    left = seats - sum(given)
    for place in [place for place in by_need if quotas[place]][: max(left, 0)]:
        given[place] += 1
    # The one seat of those below one was taken from nobody yet; the largest can spare it.
    for _ in range(-left):
        given[max(range(len(given)), key=lambda place: given[place])] -= 1
    return tuple(given)


def fair_pattern(weights: Sequence[int]) -> NDArray[np.uint16]:
    """The number of the source whose turn it is at each of ``sum(weights)`` positions, uint16.

    Of two items that are due at the same position, that of the source with the lower number goes first.
    """
    length = sum(weights)
    turns = np.empty(length, dtype=np.uint16)
    served = [0] * len(weights)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]  # (released at, source)
    due: list[tuple[int, int]] = []  # (to be served before, source)
    heapq.heapify(waiting)
    for position in range(length):
        while waiting and waiting[0][0] <= position:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(due, (-(-(served[source] + 1) * length // weights[source]), source))
        source = heapq.heappop(due)[1]
        turns[position] = source
        served[source] += 1
        if served[source] < weights[source]:
            # An item's window opens at the last position of the one before, which only one of the two can have.
            released = max(served[source] * length // weights[source], position + 1)
            heapq.heappush(waiting, (released, source))
    return turns

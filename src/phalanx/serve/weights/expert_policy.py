"""Which expert gives way: frequency with ageing, shallow layers favoured; and the optimum that it is measured against. Pure.

A layer's experts are asked for once in a pass, so what was used last is needed again last, and least recent use would be the worst of
choices. What counts is how often an expert was chosen in recent passes. Experts of deep layers can be read ahead while the layers before
them are computed, so those of shallow layers are kept a little longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

ExpertName = tuple[int, int]
"""Layer and expert."""

_AGEING = 0.9  # what a use counts after one more pass
_SHALLOW = 0.1  # how much more the first layer's uses count than the last one's


class ExpertFrequency:
    """How often each expert was needed of late."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._uses: dict[ExpertName, tuple[float, int]] = {}

    def use(self, expert: ExpertName, turn: int) -> None:
        """Counts a use in pass ``turn``."""
        self._uses[expert] = (self._aged(expert, turn) + 1.0, turn)

    def value(self, expert: ExpertName, turn: int) -> float:
        """What keeping an expert is worth."""
        return self._aged(expert, turn) * (1.0 + _SHALLOW * (self._layers - expert[0]) / self._layers)

    def least(
        self, held: Iterable[ExpertName], spared: Collection[ExpertName], turn: int
    ) -> ExpertName | None:
        """The expert to give way, of those held that are not spared."""
        return min(
            (one for one in held if one not in spared),
            key=lambda one: (self.value(one, turn), one),
            default=None,
        )

    def _aged(self, expert: ExpertName, turn: int) -> float:
        uses, last = self._uses.get(expert, (0.0, turn))
        return uses * _AGEING ** (turn - last)


def optimal_hits(trace: Sequence[ExpertName], capacity: int) -> int:
    """Hits of the best possible cache of ``capacity`` experts, which knows the whole trace (Belady, IBM Systems Journal 5, 1966)."""
    following: list[int] = [len(trace)] * len(trace)
    seen: dict[ExpertName, int] = {}
    for place in range(len(trace) - 1, -1, -1):
        following[place] = seen.get(trace[place], len(trace) + place)
        seen[trace[place]] = place
    held: dict[ExpertName, int] = {}
    furthest: list[tuple[int, ExpertName]] = []
    hits = 0
    for place, expert in enumerate(trace):
        if expert in held:
            hits += 1
        elif len(held) >= capacity:
            while True:
                when, victim = heapq.heappop(furthest)
                if held.get(victim) == -when:
                    del held[victim]
                    break
        held[expert] = following[place]
        heapq.heappush(furthest, (-following[place], expert))
    return hits

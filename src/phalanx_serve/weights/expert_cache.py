"""Experts in memory: read when the router has chosen them, kept by how often it does, prefetched where it probably will."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.pack.layout import padded_bytes
from phalanx.checkpoint.pack.reader import PackFile
from phalanx_serve.weights.ring import ReadPool, StreamStatistics, Urgency, read_ahead, wait

# Which expert gives way: frequency with ageing, shallow layers favoured; and the optimum that it is measured against. Pure.
#
# A layer's experts are asked for once in a pass, so what was used last is needed again last, and least recent use would be the worst of
# choices. What counts is how often an expert was chosen in recent passes. Experts of deep layers can be read ahead while the layers before
# them are computed, so those of shallow layers are kept a little longer.

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


_NOW: Urgency = (-1, 0)


@dataclass
class _Held:
    slot: int
    reading: list[Future[None]]


class ExpertCache:
    """At most ``slots`` experts of all layers; one thread asks."""

    def __init__(self, pack: PackFile, pool: ReadPool, slots: int, statistics: StreamStatistics) -> None:
        sections = pack.index.sections
        self._numbers = {
            (one.layer, one.expert): number for number, one in enumerate(sections) if one.kind == "expert"
        }
        self._pack, self._pool, self._statistics = pack, pool, statistics
        size = max(padded_bytes(sections[number].nbytes) for number in self._numbers.values())
        memory = page_aligned(slots * size)
        self._memory = [memory[place * size : (place + 1) * size] for place in range(slots)]
        self._free = list(range(slots))
        self._held: dict[ExpertName, _Held] = {}
        self._frequency = ExpertFrequency(1 + max(layer for layer, _ in self._numbers))
        self.slots = slots
        self.trace: list[ExpertName] | None = None
        """Every expert that was needed, in turn, if it is a list."""

    def need(self, layer: int, experts: Collection[int], turn: int) -> None:
        """Begins to read what of a layer's chosen ``experts`` is not there, as many as there is room for."""
        names = [(layer, expert) for expert in experts]
        for name in names:
            self._frequency.use(name, turn)
            if name in self._held:
                self._statistics.expert_hits += 1
                self._hurry(name)
            else:
                self._statistics.expert_misses += 1
        if self.trace is not None:
            self.trace += names
        wanted = set(names)
        for name in names:
            if name not in self._held and not self._read(name, wanted, turn, _NOW):
                break

    def prefetch(self, layer: int, experts: Iterable[int], spared: Collection[ExpertName], turn: int) -> None:
        """Begins to read experts that a layer will probably choose; what this layer needs stays."""
        names = [(layer, expert) for expert in experts][: max(1, self.slots // 4)]
        kept = {*spared, *names}
        for name in names:
            if name not in self._held:
                if not self._read(name, kept, turn, (turn << 20 | layer, 2)):
                    return
                self._statistics.prefetched += 1

    def get(self, expert: ExpertName, still_needed: Collection[ExpertName], turn: int) -> ByteArray:
        """The bytes of an expert, valid until the next call. Raises what reading it raised."""
        if expert not in self._held and not self._read(expert, still_needed, turn, _NOW):
            # All room is taken by what this layer still needs: what it needs last gives way, and is read again.
            self._drop(max(one for one in self._held if one != expert))
            self._read(expert, (), turn, _NOW)
        held = self._held[expert]
        try:
            self._statistics.expert_stall_s += wait(held.reading, f"{self._pack.path}, expert {expert}")
        except BaseException:
            self._drop(expert)
            raise
        held.reading = []
        return self._memory[held.slot][: self._pack.index.sections[self._numbers[expert]].nbytes]

    def _hurry(self, expert: ExpertName) -> None:
        """Lets a read that still waits, as one that was only guessed, go before all others."""
        held = self._held[expert]
        if held.reading and held.reading[0].cancel():
            for future in held.reading[1:]:
                if not future.cancel():
                    future.exception()
            number = self._numbers[expert]
            held.reading = read_ahead(self._pack, self._pool, number, self._memory[held.slot], _NOW)

    def _read(self, expert: ExpertName, spared: Collection[ExpertName], turn: int, urgency: Urgency) -> bool:
        if not self._free:
            victim = self._frequency.least(self._held, spared, turn)
            if victim is None:
                return False
            self._drop(victim)
        slot, number = self._free.pop(), self._numbers[expert]
        reading = read_ahead(self._pack, self._pool, number, self._memory[slot], urgency)
        self._held[expert] = _Held(slot, reading)
        self._statistics.bytes_read += self._pack.index.sections[number].nbytes
        return True

    def _drop(self, expert: ExpertName) -> None:
        held = self._held.pop(expert)
        for future in held.reading:
            if not future.cancel():
                future.exception()
        self._free.append(held.slot)

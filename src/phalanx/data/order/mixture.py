"""Which record of which source a run's sample is: computed for any sample, stored nowhere.

A run may draw from several sources in proportions that change at given steps (its *stages*). Sample g of the run is a pure function of
the seed, the batch size, the stages, the sources' weights, and g: nothing is random but the keyed permutations of ``phalanx.data.order.permutation``,
and nothing depends on who asks, in which order, or how many ranks there are. For batches of B samples:

1. *Window*: the samples of a batch are permuted among its places, so that no slot always draws from the same source.
2. *Stage*: stage j begins at sample A_j, a batch's edge. Its sources take turns in a pattern of W_j positions (``phalanx.data.order.mixture``),
   repeated: after any number of batches each source was drawn within one sample of its exact share of the stage.
3. *Draw*: what is drawn of a source is counted through all stages, so that each epoch of each source has each of its records once,
   whatever the stages do.
4. *Record*: the draws of an epoch are a permutation of the source's records, keyed by seed, the source's *name* and the epoch. So other
   sources, and their order in the run file, change nothing of it.

All of it is exact integers, can be inverted, and holds for 10^15 samples and more: a run stores its step and no more.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order.permutation import MAX_SAMPLES, key_of, permute, permute_in_turn, place_in_permutation

# Whole weights of the sources of a mixture, and the pattern in which they take turns.
#
# Drawing a source at random for each sample meets the asked proportions only on average: after n samples a source is off by some
# sqrt(n). Here sources take turns in a fixed pattern of W positions, repeated for ever, in which every prefix of p positions has each
# source of weight w within one sample of its exact share p w / W. Such a pattern is a schedule of one processor that is fair in the sense
# of Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress" (Algorithmica 15, 1996); Tijdeman's chairman assignment problem (Discrete
# Mathematics 32, 1980) is the same question. Item i of a source may be served from position floor(i W / w) on and before position
# ceil((i + 1) W / w); serving whichever of the waiting items is due first meets all of these windows.

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


@dataclass(frozen=True)
class Source:
    """A source of a mixture: so many records under a name."""

    name: str
    """Part of the keys of its order: the same name is the same order in every run of a seed."""
    records: int
    """Records that may be drawn; at least 1, and 0 only for a source that is never drawn."""
    weights: tuple[float, ...]
    """Weight in each stage, at least 0, against those of the other sources; meant as the decimals that they are written as."""


@dataclass(frozen=True)
class Located:
    """The place of each of some samples of the run; arrays of one length, int64."""

    source: NDArray[np.int64]
    """Number of the source, in the order in which the mixture was given them."""
    epoch: NDArray[np.int64]
    """Times that the whole source was drawn before, from 0."""
    record: NDArray[np.int64]
    """Number of the record in its source."""


@dataclass(frozen=True)
class _Stage:
    start: int
    """A_j, in samples of the run."""
    weights: NDArray[np.int64]
    """Whole weights; their sum is the pattern's length."""
    turns: NDArray[np.uint16]
    """The source at each position of the pattern."""
    earlier: NDArray[np.int32]
    """Positions before, in the pattern, of the same source."""
    positions: NDArray[np.int32]
    """The positions of source 0 in order, then those of source 1, and so on."""
    first: NDArray[np.int64]
    """Where each source's begin in ``positions``."""

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """What was drawn of each source in the stage's first ``samples``."""
        cycles, rest = divmod(samples, len(self.turns))
        begun = np.bincount(self.turns[:rest], minlength=len(self.weights)).astype(np.int64)
        return cycles * self.weights + begun

    def sample_of(self, source: int, draw: int) -> int:
        """The stage's sample that is its draw number ``draw`` of a source that has a weight in it."""
        cycles, item = divmod(draw, int(self.weights[source]))
        return cycles * len(self.turns) + int(self.positions[int(self.first[source]) + item])


class Mixture:
    """The order of a run over several sources. Threads may share it."""

    def __init__(self, sources: Sequence[Source], stages: Sequence[int], seed: int, batch_size: int) -> None:
        """``stages`` are the numbers of steps after which each begins, 0 first. Raises ``ValueError`` with what is wrong."""
        _require_whole(sources, stages, batch_size)
        self.sources = tuple(sources)
        self.batch_size = batch_size
        self._seed = seed
        self._starts = np.array([step * batch_size for step in stages], dtype=np.int64)
        # By name, so that the order in the run file breaks no tie.
        by_name = sorted(range(len(sources)), key=lambda number: sources[number].name)
        self._stages = [
            _stage(int(start), [source.weights[number] for source in sources], by_name)
            for number, start in enumerate(self._starts)
        ]
        drawn = np.zeros(len(sources), dtype=np.int64)
        before = [drawn]
        for stage, following in itertools.pairwise(self._stages):
            drawn = drawn + stage.drawn(following.start - stage.start)
            before.append(drawn)
        self._drawn_before = np.array(before)
        for source, ever in zip(
            sources, np.any([stage.weights for stage in self._stages], axis=0), strict=True
        ):
            if ever and not 1 <= source.records <= MAX_SAMPLES:
                raise ValueError(f"source {source.name!r} has {source.records} records to draw from")

    def shares(self, stage: int) -> tuple[Fraction, ...]:
        """The exact share of each source's samples in a stage."""
        weights = self._stages[stage].weights
        return tuple(Fraction(int(weight), int(weights.sum())) for weight in weights)

    def locate(self, samples: NDArray[np.int64]) -> Located:
        """The places of the run's ``samples``: one dimension, any order. Raises ``ValueError`` for one below 0 or above ``MAX_SAMPLES``."""
        if samples.size and not (samples.min() >= 0 and samples.max() < MAX_SAMPLES):
            raise ValueError(f"samples {samples.min()}..{samples.max()} are not all in [0, {MAX_SAMPLES})")
        dealt = self._windowed(samples)
        source, draw = np.empty_like(dealt), np.empty_like(dealt)
        for number, chosen in _groups(np.searchsorted(self._starts, dealt, side="right") - 1):
            stage = self._stages[number]
            cycle, position = np.divmod(dealt[chosen] - stage.start, len(stage.turns))
            source[chosen] = turns = stage.turns[position]
            draw[chosen] = (
                self._drawn_before[number][turns] + cycle * stage.weights[turns] + stage.earlier[position]
            )
        records = np.array([max(1, one.records) for one in self.sources], dtype=np.int64)
        epoch, place = np.divmod(draw, records[source])
        record = np.empty_like(dealt)
        for number, of_source in _groups(source):
            for number_of_epoch, of_epoch in _groups(epoch[of_source]):
                chosen = of_source[of_epoch]
                record[chosen] = permute(
                    place[chosen], n=int(records[number]), key=self._epoch_key(number, number_of_epoch)
                )
        return Located(source, epoch, record)

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """What the run's first ``samples`` draw of each source: records, an epoch's second time counted too."""
        batches, rest = divmod(samples, self.batch_size)
        whole = batches * self.batch_size
        number = int(np.searchsorted(self._starts, whole, side="right")) - 1
        stage = self._stages[number]
        drawn: NDArray[np.int64] = self._drawn_before[number] + stage.drawn(whole - stage.start)
        if rest:
            begun = self.locate(np.arange(whole, whole + rest, dtype=np.int64)).source
            drawn = drawn + np.bincount(begun, minlength=len(self.sources))
        return drawn

    def step_of_draw(self, source: int, draw: int) -> int | None:
        """The step, counted from 1, that makes draw number ``draw`` (from 0) of a source; ``None`` if no step does."""
        number = int(np.searchsorted(self._drawn_before[:, source], draw, side="right")) - 1
        stage = self._stages[number]
        if not stage.weights[source]:
            return None
        sample = stage.start + stage.sample_of(source, draw - int(self._drawn_before[number, source]))
        return sample // self.batch_size + 1

    def steps_of(self, source: str, record: int, until: int) -> list[int]:
        """The steps among the first ``until``, counted from 1, that train on ``record`` of the source called ``source``.

        Raises ``ValueError`` if there is no such source or record.
        """
        number = next((n for n, one in enumerate(self.sources) if one.name == source), None)
        if number is None:
            names = ", ".join(one.name for one in self.sources)
            raise ValueError(f"no source is called {source!r}; there are: {names}")
        records = self.sources[number].records
        if not 0 <= record < records:
            raise ValueError(
                f"source {source!r} has no record {record}: there are {records:,}, counted from 0"
            )
        drawn = int(self.drawn(until * self.batch_size)[number])
        found = []
        for epoch in range(-(-drawn // records)):
            at = np.array([record], dtype=np.int64)
            place = place_in_permutation(at, n=records, key=self._epoch_key(number, epoch))
            draw = epoch * records + int(place[0])
            step = self.step_of_draw(number, draw) if draw < drawn else None
            if step is not None:
                found.append(step)
        return found

    def _windowed(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each sample's number before the samples of its batch were permuted."""
        order = np.argsort(samples, kind="stable")  # in no time where they are in order already
        batch, place = np.divmod(samples[order], self.batch_size)
        numbers, turn = np.unique(batch, return_inverse=True)
        keys = [key_of("window", self._seed, number) for number in numbers.tolist()]
        dealt = np.empty_like(samples)
        dealt[order] = batch * self.batch_size + permute_in_turn(place, turn, n=self.batch_size, keys=keys)
        return dealt

    def _epoch_key(self, source: int, epoch: int) -> int:
        return key_of("source", self._seed, epoch, self.sources[source].name)


def _groups(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each value that occurs, with the places where it does."""
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for places in np.split(order, edges) if len(order) else ():
        yield int(values[places[0]]), places


def _stage(start: int, weights: Sequence[float], by_name: Sequence[int]) -> _Stage:
    whole = np.array(whole_weights(weights), dtype=np.int64)
    turns = np.array(by_name, dtype=np.uint16)[fair_pattern([int(whole[number]) for number in by_name])]
    positions = np.argsort(turns, kind="stable").astype(np.int32)
    first = np.concatenate([[0], np.cumsum(whole)[:-1]]).astype(np.int64)
    earlier = np.empty(len(turns), dtype=np.int32)
    earlier[positions] = np.arange(len(turns)) - first[turns[positions]]
    return _Stage(start, whole, turns, earlier, positions, first)


def _require_whole(sources: Sequence[Source], stages: Sequence[int], batch_size: int) -> None:
    names = [source.name for source in sources]
    if not 1 <= len(sources) <= MOST_SOURCES or len(set(names)) < len(names):
        raise ValueError(f"{len(names)} sources with {len(set(names))} names; at least one, and each another")
    if not stages or stages[0] != 0 or any(a >= b for a, b in itertools.pairwise(stages)):
        raise ValueError(f"stages {list(stages)} do not begin with 0 and increase")
    if batch_size < 1 or stages[-1] * batch_size >= MAX_SAMPLES:
        raise ValueError(f"batch_size = {batch_size} is not positive, or too large for the stages")
    for source in sources:
        if len(source.weights) != len(stages):
            raise ValueError(
                f"source {source.name!r} has {len(source.weights)} weights, for {len(stages)} stages"
            )

"""Compute the source and record of any sample of a run; nothing is stored.

A run may draw from several sources in proportions that change at given steps (its *stages*). Sample g is a pure function of the seed, the batch
size, the stages, the sources' weights, and g. It does not depend on the number of ranks or on the order of calls. For batches of B samples:

1. *Window*: the samples of a batch are permuted, so that no slot always draws from the same source.
2. *Stage*: stage j begins at sample A_j, a batch boundary. Its sources alternate in a repeated pattern of W_j positions. After any number of
   batches, each source was drawn within one sample of its exact share of the stage.
3. *Draw*: draws from a source are counted through all stages, so each epoch of a source has each record once.
4. *Record*: the draws of an epoch are a permutation of the source's records, keyed by the seed, the source's *name* and the epoch. Other sources
   and their order in the run file do not change it.

All computations use exact integers, are invertible, and hold for more than 10^15 samples. A run stores only its step.
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

# Integer weights of a mixture's sources, and the pattern in which they alternate.
#
# Random draws match the requested proportions only on average: after n samples, a source is off by about sqrt(n). Here sources alternate in
# a fixed, repeated pattern of W positions. In every prefix of p positions, a source of weight w is within one sample of its exact share
# p w / W. Such a pattern is a fair single-processor schedule (Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress", Algorithmica 15,
# 1996). Tijdeman's chairman assignment problem (Discrete Mathematics 32, 1980) is the same problem. Item i of a source has the window from
# position floor(i W / w) to before ceil((i + 1) W / w). Serving the released item with the earliest deadline meets all windows.

LONGEST_PATTERN = 1 << 20
"""Maximum length of a pattern. A table of this length takes 10 MiB and about two seconds to build."""
MOST_SOURCES = 1 << 16


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in the proportions of ``weights``, which are read as decimals: 0.1 is one tenth.

    They are the smallest such integers if their sum is at most ``LONGEST_PATTERN``. Otherwise ``LONGEST_PATTERN`` is apportioned by largest
    remainders, with at least 1 for each positive weight. Raises ``ValueError`` for a weight that is negative or not finite, and if none is
    positive.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights {list(weights)} are not all finite and at least 0")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise ValueError(f"of the weights {list(weights)} none is positive")
    common = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * common) for weight in exact]
    divisor = math.gcd(*integers)
    smallest = tuple(weight // divisor for weight in integers)
    return (
        smallest
        if sum(smallest) <= LONGEST_PATTERN
        else _apportioned([weight / total for weight in exact], LONGEST_PATTERN)
    )


def _apportioned(shares: Sequence[Fraction], seats: int) -> tuple[int, ...]:
    """Return ``seats`` divided by largest remainders (Hamilton's method), with at least one for each positive share."""
    quotas = [share * seats for share in shares]
    assigned = [max(1, math.floor(quota)) if quota else 0 for quota in quotas]
    by_need = sorted(range(len(quotas)), key=lambda index: assigned[index] - quotas[index])
    remaining = seats - sum(assigned)
    for index in [index for index in by_need if quotas[index]][: max(remaining, 0)]:
        assigned[index] += 1
    # Shares below one seat were rounded up; the largest shares give up these seats.
    for _ in range(-remaining):
        assigned[max(range(len(assigned)), key=lambda index: assigned[index])] -= 1
    return tuple(assigned)


def fair_pattern(weights: Sequence[int]) -> NDArray[np.uint16]:
    """Return the number of the source at each of ``sum(weights)`` positions, uint16: source i occurs ``weights[i]``
    times, evenly spread.

    Earliest deadline first: each item has a window in proportion to its number. If two have the same deadline, the
    source with the lower number comes first.
    """
    length = sum(weights)
    turns = np.empty(length, dtype=np.uint16)
    served = [0] * len(weights)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]  # (released at, source)
    due: list[tuple[int, int]] = []  # (deadline, source)
    heapq.heapify(waiting)
    for position in range(length):
        while waiting and waiting[0][0] <= position:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(due, (-(-(served[source] + 1) * length // weights[source]), source))
        source = heapq.heappop(due)[1]
        turns[position] = source
        served[source] += 1
        if served[source] < weights[source]:
            # An item's window opens at the last position of the previous item's window, which only one of them can use.
            released = max(served[source] * length // weights[source], position + 1)
            heapq.heappush(waiting, (released, source))
    return turns


@dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture: its name, number of records and weights."""

    name: str
    """Part of the key of its order: the same name and seed give the same order in every run."""
    records: int
    """Number of records. At least 1, or 0 for a source that is never drawn."""
    weights: tuple[float, ...]
    """Weight in each stage, relative to the other sources; at least 0, read as a decimal."""


@dataclass(frozen=True)
class Located:
    """Source, epoch and record of each of some samples; int64 arrays of one length."""

    source: NDArray[np.int64]
    """Number of the source, in the order of the mixture's sources."""
    epoch: NDArray[np.int64]
    """Number of complete earlier passes over the source."""
    record: NDArray[np.int64]
    """Number of the record in its source."""


@dataclass(frozen=True)
class _Stage:
    start: int
    """A_j, in samples of the run."""
    weights: NDArray[np.int64]
    """Integer weights; their sum is the pattern's length."""
    turns: NDArray[np.uint16]
    """The source at each position of the pattern."""
    earlier: NDArray[np.int32]
    """Number of earlier positions of the same source in the pattern."""
    positions: NDArray[np.int32]
    """The positions of source 0 in order, then those of source 1, and so on."""
    first: NDArray[np.int64]
    """Offset of each source's first entry in ``positions``."""

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """Return the number of draws from each source in the stage's first ``samples``."""
        cycles, remainder = divmod(samples, len(self.turns))
        partial = np.bincount(self.turns[:remainder], minlength=len(self.weights)).astype(np.int64)
        return cycles * self.weights + partial

    def sample_of(self, source: int, draw: int) -> int:
        """Return the stage's sample that is draw number ``draw`` of a source, which must have a weight in the stage."""
        cycles, item = divmod(draw, int(self.weights[source]))
        return cycles * len(self.turns) + int(self.positions[int(self.first[source]) + item])


class Mixture:
    """The order of a run over several sources. Thread-safe."""

    def __init__(
        self, sources: Sequence[MixtureSource], stages: Sequence[int], seed: int, batch_size: int
    ) -> None:
        """Compute each stage's pattern, and the draws before each stage. ``stages`` are the steps after which each
        begins, 0 first.

        Raises ``ValueError`` for stages or weights that are not valid, and for a source in use without records.
        """
        _require_valid(sources, stages, batch_size)
        self.sources = tuple(sources)
        self.batch_size = batch_size
        self._seed = seed
        self._starts = np.array([step * batch_size for step in stages], dtype=np.int64)
        # Sorted by name, so that ties do not depend on the order in the run file.
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
        """Return the exact share of each source's samples in a stage."""
        weights = self._stages[stage].weights
        return tuple(Fraction(int(weight), int(weights.sum())) for weight in weights)

    def locate(self, samples: NDArray[np.int64]) -> Located:
        """Return the source, epoch and record of each of the run's ``samples`` (one-dimensional, any order).

        Raises ``ValueError`` for a sample that is not in 0 to ``MAX_SAMPLES``.
        """
        if samples.size and not (samples.min() >= 0 and samples.max() < MAX_SAMPLES):
            raise ValueError(f"samples {samples.min()}..{samples.max()} are not all in [0, {MAX_SAMPLES})")
        pattern_samples = self._windowed(samples)
        source, draw = np.empty_like(pattern_samples), np.empty_like(pattern_samples)
        for number, chosen in _groups(np.searchsorted(self._starts, pattern_samples, side="right") - 1):
            stage = self._stages[number]
            cycle, position = np.divmod(pattern_samples[chosen] - stage.start, len(stage.turns))
            source[chosen] = turns = stage.turns[position]
            draw[chosen] = (
                self._drawn_before[number][turns] + cycle * stage.weights[turns] + stage.earlier[position]
            )
        records = np.array([max(1, source.records) for source in self.sources], dtype=np.int64)
        epoch, position_in_epoch = np.divmod(draw, records[source])
        record = np.empty_like(pattern_samples)
        for number, in_source in _groups(source):
            for number_of_epoch, in_epoch in _groups(epoch[in_source]):
                chosen = in_source[in_epoch]
                record[chosen] = permute(
                    position_in_epoch[chosen],
                    n=int(records[number]),
                    key=self._epoch_key(number, number_of_epoch),
                )
        return Located(source, epoch, record)

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """Return the number of draws from each source in the run's first ``samples``, including repeats in later
        epochs: int64, (sources,).
        """
        batches, remainder = divmod(samples, self.batch_size)
        complete = batches * self.batch_size
        number = int(np.searchsorted(self._starts, complete, side="right")) - 1
        stage = self._stages[number]
        drawn: NDArray[np.int64] = self._drawn_before[number] + stage.drawn(complete - stage.start)
        if remainder:
            partial_sources = self.locate(np.arange(complete, complete + remainder, dtype=np.int64)).source
            drawn = drawn + np.bincount(partial_sources, minlength=len(self.sources))
        return drawn

    def step_of_draw(self, source: int, draw: int) -> int | None:
        """Return the step, counted from 1, that makes draw number ``draw`` (from 0) of a source; it may be after the run's end.

        ``None`` if the last stage does not use the source and earlier ones draw less.
        """
        number = int(np.searchsorted(self._drawn_before[:, source], draw, side="right")) - 1
        stage = self._stages[number]
        if not stage.weights[source]:
            return None
        sample = stage.start + stage.sample_of(source, draw - int(self._drawn_before[number, source]))
        return sample // self.batch_size + 1

    def steps_of(self, source: str, record: int, until: int) -> list[int]:
        """Return the steps among the first ``until``, counted from 1, that train on ``record``, counted from 0, of the source named
        ``source``.

        They ascend, one for each time that the record is drawn: a step is there twice if its batch has the record from two epochs. Raises
        ``ValueError`` if there is no such source or record.
        """
        number = next((n for n, candidate in enumerate(self.sources) if candidate.name == source), None)
        if number is None:
            names = ", ".join(candidate.name for candidate in self.sources)
            raise ValueError(f"no source is called {source!r}; there are: {names}")
        records = self.sources[number].records
        if not 0 <= record < records:
            raise ValueError(
                f"source {source!r} has no record {record}: there are {records:,}, counted from 0"
            )
        drawn = int(self.drawn(until * self.batch_size)[number])
        steps = []
        for epoch in range(-(-drawn // records)):
            record_array = np.array([record], dtype=np.int64)
            place = place_in_permutation(record_array, n=records, key=self._epoch_key(number, epoch))
            draw = epoch * records + int(place[0])
            step = self.step_of_draw(number, draw) if draw < drawn else None
            if step is not None:
                steps.append(step)
        return steps

    def _windowed(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each sample's number in the pattern: samples of a batch are permuted within it, by a key of seed and
        batch. Shape and order are those of ``samples``.
        """
        order = np.argsort(samples, kind="stable")  # fast if they are sorted already
        batch, place = np.divmod(samples[order], self.batch_size)
        numbers, turn = np.unique(batch, return_inverse=True)
        keys = [key_of("window", self._seed, number) for number in numbers.tolist()]
        unpermuted = np.empty_like(samples)
        unpermuted[order] = batch * self.batch_size + permute_in_turn(
            place, turn, n=self.batch_size, keys=keys
        )
        return unpermuted

    def _epoch_key(self, source: int, epoch: int) -> int:
        return key_of("source", self._seed, epoch, self.sources[source].name)


def _groups(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each value that occurs, with its indices."""
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for places in np.split(order, edges) if len(order) else ():
        yield int(values[places[0]]), places


def _stage(start: int, weights: Sequence[float], by_name: Sequence[int]) -> _Stage:
    """Return a stage that starts at sample ``start``, with its pattern and the tables that invert it.

    Ties go by the source's name.
    """
    integer_weights = np.array(whole_weights(weights), dtype=np.int64)
    turns = np.array(by_name, dtype=np.uint16)[
        fair_pattern([int(integer_weights[number]) for number in by_name])
    ]
    positions = np.argsort(turns, kind="stable").astype(np.int32)
    first = np.concatenate([[0], np.cumsum(integer_weights)[:-1]]).astype(np.int64)
    earlier = np.empty(len(turns), dtype=np.int32)
    earlier[positions] = np.arange(len(turns)) - first[turns[positions]]
    return _Stage(start, integer_weights, turns, earlier, positions, first)


def _require_valid(sources: Sequence[MixtureSource], stages: Sequence[int], batch_size: int) -> None:
    """Raise ``ValueError`` for no, too many or equally named sources, stages that do not increase from 0, a
    ``batch_size`` out of range, or another number of weights than of stages.
    """
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

"""The order of a run over several sources, against brute force and against itself cut in other ways."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order.mixture import (
    LONGEST_PATTERN,
    Located,
    Mixture,
    MixtureSource,
    fair_pattern,
    whole_weights,
)
from phalanx.data.order.permutation import key_of, permute

SOURCES = (
    MixtureSource("web", 5000, (0.82, 0.3, 0.0)),
    MixtureSource("code", 700, (0.15, 0.3, 0.5)),
    MixtureSource("books", 41, (0.03, 0.2, 0.25)),
    MixtureSource("math", 1200, (0.0, 0.2, 0.25)),
    MixtureSource("notes", 3, (0.0, 0.001, 0.0)),
)
STAGES = (0, 100, 300)
BATCH = 32
SAMPLES = 500 * BATCH


def mixture(sources: tuple[MixtureSource, ...] = SOURCES, stages: tuple[int, ...] = STAGES) -> Mixture:
    return Mixture(sources, stages, seed=7, batch_size=BATCH)


def places(located: Located) -> list[tuple[int, int, int]]:
    return list(zip(located.source.tolist(), located.epoch.tolist(), located.record.tolist(), strict=True))


def all_of(order: Mixture, samples: int = SAMPLES) -> list[tuple[int, int, int]]:
    return places(order.locate(np.arange(samples)))


small_mixtures = st.builds(
    lambda rows, stages, seed, batch: Mixture(
        [
            MixtureSource(f"s{n}", records, tuple(float(w) for w in weights[: len(stages)]))
            for n, (records, weights) in enumerate([(9, [1, 1, 1, 1]), *rows])
        ],
        stages,
        seed,
        batch,
    ),
    st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 12), min_size=4, max_size=4)), max_size=6),
    st.lists(st.integers(1, 30), max_size=3, unique=True).map(lambda steps: [0, *sorted(steps)]),
    st.integers(0, 2**64 - 1),
    st.integers(1, 20),
)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40).filter(any))
def test_every_prefix_of_a_pattern_has_each_source_within_one_of_its_share(weights: list[int]) -> None:
    turns, total = fair_pattern(weights), sum(weights)
    for source, weight in enumerate(weights):
        counts = np.concatenate([[0], np.cumsum(turns == source)])
        assert np.all(np.abs(counts * total - np.arange(total + 1) * weight) < total)  # whole numbers


def test_a_weight_is_the_decimal_that_is_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([3, 6.0, 0]) == (1, 2, 0)
    assert whole_weights([1e-05, 0.99999]) == (1, 99999)


@given(st.lists(st.floats(1e-9, 1), min_size=2, max_size=20))
def test_weights_beyond_the_longest_pattern_are_apportioned_and_leave_nobody_out(
    weights: list[float],
) -> None:
    integers, exact = whole_weights(weights), [Fraction(str(weight)) for weight in weights]
    assert min(integers) >= 1
    assert sum(integers) <= LONGEST_PATTERN
    for integer, fraction in zip(integers, exact, strict=True):
        off = Fraction(integer, sum(integers)) - fraction / sum(exact)
        assert abs(off) * LONGEST_PATTERN <= len(weights)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_without_a_meaning_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        whole_weights(weights)


def plainly(
    sources: tuple[MixtureSource, ...], stages: tuple[int, ...], seed: int, batch: int, samples: int
) -> list[tuple[int, int, int]]:
    """The places of the first samples by the definition: one after the other, with counters, in Python's integers."""
    dealt: list[tuple[int, int, int]] = []
    drawn = [0] * len(sources)
    for place in range(-(-samples // batch) * batch):
        stage = max(number for number, step in enumerate(stages) if step * batch <= place)
        start = stages[stage] * batch
        fractions = [Fraction(str(source.weights[stage])) for source in sources]
        total = sum(fractions)
        # The next item is the one due first among those that may be served; the pattern is the schedule from the stage's start on.
        position = place - start
        if position == 0:
            served = [0] * len(sources)
        waiting = [
            (math.ceil((served[n] + 1) * total / share), sources[n].name, n)
            for n, share in enumerate(fractions)
            if share and math.floor(served[n] * total / share) <= position
        ]
        number = min(waiting)[2]
        served[number] += 1
        epoch, item = divmod(drawn[number], sources[number].records)
        drawn[number] += 1
        key = key_of("source", seed, epoch, sources[number].name)
        record = int(permute(np.array([item]), n=sources[number].records, key=key)[0])
        dealt.append((number, epoch, record))
    windows = [
        permute(np.arange(batch), n=batch, key=key_of("window", seed, n)) for n in range(len(dealt) // batch)
    ]
    return [dealt[n * batch + int(place)] for n, window in enumerate(windows) for place in window][:samples]


@settings(max_examples=40, deadline=None)
@given(small_mixtures)
def test_the_places_are_those_of_the_definition(order: Mixture) -> None:
    stages = tuple(int(start) // order.batch_size for start in order._starts)
    samples = min(40 * order.batch_size, 400)
    assert all_of(order, samples) == plainly(order.sources, stages, order._seed, order.batch_size, samples)


def test_the_order_of_a_mixture_is_that_of_earlier_releases() -> None:
    digest = hashlib.sha256(json.dumps(all_of(mixture())).encode()).hexdigest()
    assert digest == "2f0bb28251a1098e1304dc6d4415a23da31a6013fde40ea2972bbb0e76a19065"


@settings(max_examples=50, deadline=None)
@given(small_mixtures)
def test_every_epoch_of_every_source_has_every_record_once(order: Mixture) -> None:
    draws = all_of(order, 40 * order.batch_size)
    assert len(set(draws)) == len(draws)
    drawn = Counter(source for source, _, _ in draws)
    for source, epoch, _ in draws:  # an epoch begins when all of the one before was drawn
        assert epoch <= (drawn[source] - 1) // order.sources[source].records
    for source, count in drawn.items():
        full_epochs = count // order.sources[source].records
        assert (
            sum(1 for s, e, _ in draws if s == source and e < full_epochs)
            == full_epochs * order.sources[source].records
        )


@settings(max_examples=50, deadline=None)
@given(small_mixtures, st.integers(0, 800))
def test_what_is_drawn_is_what_counting_finds(order: Mixture, samples: int) -> None:
    counted = np.bincount(order.locate(np.arange(samples)).source, minlength=len(order.sources))
    assert order.drawn(samples).tolist() == counted.tolist()


@settings(max_examples=50, deadline=None)
@given(small_mixtures, st.data())
def test_any_subset_in_any_order_has_the_same_places(order: Mixture, data: st.DataObject) -> None:
    all_places = all_of(order, 300)
    numbers = data.draw(st.lists(st.integers(0, 299), max_size=60))
    assert places(order.locate(np.array(numbers, dtype=np.int64))) == [
        all_places[number] for number in numbers
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_any_number_of_ranks_draws_the_same(ranks: int) -> None:
    order, all_places = mixture(), all_of(mixture())
    for step in range(90, 110):
        slots = np.array_split(np.arange(step * BATCH, (step + 1) * BATCH), ranks)
        drawn = [place for slot in slots for place in places(order.locate(slot))]
        assert drawn == all_places[step * BATCH : (step + 1) * BATCH]


def test_each_batch_is_within_two_samples_of_its_shares() -> None:
    order = mixture()
    source = order.locate(np.arange(100 * BATCH)).source.reshape(100, BATCH)
    for number, share in enumerate(order.shares(0)):
        assert np.all(np.abs((source == number).sum(axis=1) - float(share * BATCH)) < 2)


def test_a_slot_draws_from_other_sources_in_other_batches() -> None:
    first_places = mixture().locate(np.arange(0, 100 * BATCH, BATCH)).source
    assert 5 <= np.count_nonzero(first_places == 1) <= 30  # 15 expected


def test_a_stage_that_is_added_changes_nothing_before_it() -> None:
    longer = tuple(replace(source, weights=(*source.weights, 1.0)) for source in SOURCES)
    assert all_of(mixture(longer, (*STAGES, 400)))[: 400 * BATCH] == all_of(mixture())[: 400 * BATCH]


def draws_of(sources: tuple[MixtureSource, ...], name: str) -> list[int]:
    """The records of a source in the order of its draws: in batches of one, nothing is permuted within a batch."""
    order = Mixture(sources, [0], seed=7, batch_size=1)
    number = [source.name for source in sources].index(name)
    return [record for source, _, record in all_of(order) if source == number]


def test_without_another_source_a_source_yields_its_records_in_the_same_order() -> None:
    all_sources = tuple(replace(source, weights=(1.0,)) for source in SOURCES)
    fewer = tuple(source for source in all_sources if source.name != "books")
    for name in ("web", "code", "math"):
        before, after = draws_of(all_sources, name), draws_of(fewer, name)
        assert len(before) == SAMPLES // 5
        assert after[: len(before)] == before


def test_the_order_of_sources_in_the_run_file_changes_nothing() -> None:
    other = mixture(SOURCES[::-1])
    assert [(4 - source, epoch, record) for source, epoch, record in all_of(other)] == all_of(mixture())


@settings(max_examples=50, deadline=None)
@given(small_mixtures, st.integers(0, 40))
def test_the_steps_of_a_record_are_those_that_draw_it(order: Mixture, until: int) -> None:
    draws = all_of(order, until * order.batch_size)
    for number, source in enumerate(order.sources):
        record = source.records // 2
        steps = [
            at // order.batch_size + 1 for at, (s, _, r) in enumerate(draws) if (s, r) == (number, record)
        ]
        assert sorted(order.steps_of(source.name, record, until)) == steps


def test_a_draw_that_never_comes_has_no_step() -> None:
    order = mixture((MixtureSource("a", 10, (1.0, 0.0)), MixtureSource("b", 10, (0.0, 1.0))), (0, 2))
    assert order.step_of_draw(0, 2 * BATCH - 1) == 2
    assert order.step_of_draw(0, 2 * BATCH) is None
    assert order.step_of_draw(1, 0) == 3


def test_samples_far_beyond_any_run_are_located_exactly() -> None:
    order, first = mixture(), 10**15 // BATCH * BATCH
    located = order.locate(np.arange(first, first + 4 * BATCH))
    counted = np.bincount(located.source, minlength=len(SOURCES))
    assert (order.drawn(first + 4 * BATCH) - order.drawn(first)).tolist() == counted.tolist()
    assert int(order.drawn(first).sum()) == first
    of_code = int(located.record[located.source == 1][0])
    draw = int(order.drawn(first)[1])
    assert order.step_of_draw(1, draw) == first // BATCH + 1
    assert 0 <= of_code < 700


@pytest.mark.parametrize(
    ("sources", "stages", "message"),
    [
        ((), (0,), "sources"),
        ((MixtureSource("a", 1, (1.0,)), MixtureSource("a", 1, (1.0,))), (0,), "names"),
        ((MixtureSource("a", 1, (1.0, 1.0)),), (0,), "weights"),
        ((MixtureSource("a", 1, (1.0,)),), (5,), "begin with 0"),
        ((MixtureSource("a", 1, (1.0, 1.0, 1.0)),), (0, 9, 9), "increase"),
        ((MixtureSource("a", 0, (1.0,)),), (0,), "0 records"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(
    sources: tuple[MixtureSource, ...], stages: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(sources, stages)

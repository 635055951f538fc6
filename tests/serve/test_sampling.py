"""Sampling by counters: the right distribution and the right sets, and one draw wherever it is made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from phalanx_serve.engine.sampler import (
    LogitsError,
    binary_powers,
    draw,
    draw_rows,
    drawn_together,
    gumbel,
    gumbel_quantiles,
    kept,
    require_sampling,
)
from phalanx_serve.traffic.events import Sampling

# Few values, so that many are equal.
logits = st.lists(
    st.one_of(st.integers(-6, 6).map(float), st.floats(-20, 20, width=32)), min_size=1, max_size=40
).map(torch.tensor)
samplings = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5)),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(-(2**63), 2**64),
    choice=st.integers(0, 100),
)


def chi_squared(drawn: list[int], expected: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected))
    return float(((counts - expected) ** 2 / expected).sum())


@given(logits, samplings, st.integers(1, 60))
def test_ids_beyond_the_tokenizer_are_drawn_by_nobody(
    scores: torch.Tensor, sampling: Sampling, vocab_size: int
) -> None:
    known = scores[:vocab_size]
    padded = replace(sampling, vocab_size=vocab_size)
    assert draw(scores, padded, 3) == draw(known, sampling, 3)
    assert drawn_together(scores[None], [padded], [3]).tolist() == [draw(known, sampling, 3)]


# The tables


def test_entries_of_the_table_of_powers_are_the_nearest_integers() -> None:
    with mp.workprec(120):
        for place, entry in enumerate(binary_powers()):
            assert abs(mpf(2) ** (40 - mpf(place) / 4096) - entry) <= 0.5, place


def test_the_table_of_gumbel_numbers_is_the_same_where_logarithms_are_off_by_one_ulp() -> None:
    places = [mpf(2) ** (octave - 54) * (1 + mpf(cell) / 256) for octave in range(53) for cell in range(256)]
    places.append(mpf(0.5))
    with mp.workprec(120):
        exact = [-mp.log(-log(place)) for log in (lambda x: mp.log1p(-x), mp.log) for place in places]
        for value, entry in zip(exact, gumbel_quantiles(), strict=True):
            # The outer logarithm's error, and that of its argument.
            allowed = math.ulp(float(value)) + 2**-52
            assert abs(value * 2**30 - entry) < 0.5 - allowed * 2**30, value


# The distribution


@pytest.mark.parametrize("varied", ["position", "seed", "choice"])
def test_tokens_are_drawn_as_often_as_they_are_likely(varied: str) -> None:
    scores = torch.tensor([2.0, 0.0, 1.0, -3.0])
    drawn = []
    for number in range(6000):
        sampling = Sampling(temperature=0.7)
        if varied != "position":
            sampling = replace(sampling, **{varied: number})
        drawn.append(draw(scores, sampling, number if varied == "position" else 5))
    # 3 degrees of freedom: exceeded with probability 0.001, and the numbers are fixed.
    assert chi_squared(drawn, (scores / 0.7).softmax(0) * 6000) < 16.3


def test_a_large_vocabulary_is_drawn_as_its_softmax() -> None:
    scores = torch.linspace(4, -4, 20_000)
    drawn = [draw(scores, Sampling(), position) // 2000 for position in range(2000)]
    expected = scores.double().softmax(0).view(10, 2000).sum(1) * 2000
    assert chi_squared(drawn, expected) < 27.9  # 9 degrees of freedom, probability 0.001


def test_gumbel_numbers_have_gumbels_distribution() -> None:
    numbers = gumbel(12345, torch.arange(1_000_000)).sort().values
    ideal = (-(-numbers).exp()).exp()
    steps = torch.arange(1, len(numbers) + 1) / len(numbers)
    # Kolmogorov and Smirnov: exceeded with probability 0.001.
    assert float((ideal - steps).abs().max()) < 1.95 / math.sqrt(len(numbers))


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_gumbel_numbers_stay_within_what_their_table_holds(key: int, index: int) -> None:
    number = float(gumbel(key, torch.tensor([index])))
    assert -3.7 < number < 37.5
    assert number * 2**30 == int(number * 2**30)


@pytest.mark.parametrize("other", [Sampling(seed=1), Sampling(choice=1)], ids=["seed", "choice"])
def test_texts_of_other_seeds_and_choices_are_independent(other: Sampling) -> None:
    scores = torch.zeros(8)
    pairs = [
        draw(scores, Sampling(), position) * 8 + draw(scores, other, position) for position in range(3000)
    ]
    # 63 degrees of freedom, probability 0.001.
    assert chi_squared(pairs, torch.full((64,), 3000 / 64)) < 103.4


# The kept tokens


def kept_by_definition(scores: torch.Tensor, sampling: Sampling) -> tuple[set[int], bool]:
    """The kept set in plain Python, and whether a cut is so near to a token's own mass that rounding decides."""
    probabilities = (scores.double() / sampling.temperature).softmax(0).tolist()
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    order = order[: sampling.top_k] if sampling.top_k else order
    total, before, left, near = sum(probabilities[i] for i in order), 0.0, [], False
    for i in order:
        near |= abs(before - sampling.top_p * total) < 1e-6
        if before < sampling.top_p * total or sampling.top_p == 1:
            left.append(i)
        before += probabilities[i]
    threshold = sampling.min_p * probabilities[order[0]]
    near |= any(abs(probabilities[i] - threshold) < 1e-6 for i in left[1:])
    return {i for i in left if probabilities[i] >= threshold or i == order[0]}, near


@given(logits, samplings)
@settings(max_examples=300)
def test_the_kept_tokens_are_those_of_the_definitions(scores: torch.Tensor, sampling: Sampling) -> None:
    sampling = replace(sampling, temperature=sampling.temperature or 1.0)
    ids = kept(scores, sampling).tolist()
    assert ids == sorted(ids, key=lambda i: (-float(scores[i]), i))
    expected, near = kept_by_definition(scores, sampling)
    assert near or set(ids) == expected


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99])
def test_a_nucleus_of_thousands_of_tokens_is_that_of_the_definition(top_p: float) -> None:
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(top_p=top_p)
    expected, _ = kept_by_definition(scores, sampling)
    assert abs(len(kept(scores, sampling)) - len(expected)) <= 1


@given(logits, samplings, st.integers(0, 10**6))
def test_only_kept_tokens_are_drawn(scores: torch.Tensor, sampling: Sampling, position: int) -> None:
    token = draw(scores, sampling, position)
    if sampling.temperature:
        assert token in kept(scores, sampling).tolist()
    else:
        assert token == min(i for i in range(len(scores)) if scores[i] == scores.max())


@given(logits, st.integers(0, 2**64), st.integers(0, 10**6))
def test_cuts_that_leave_all_in_change_nothing(scores: torch.Tensor, seed: int, position: int) -> None:
    plain = Sampling(seed=seed)
    cut = replace(plain, top_k=len(scores), min_p=1e-300)
    assert draw(scores, plain, position) == draw(scores, cut, position)


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    scores = torch.tensor([0.0, -math.inf, 0.0])
    assert {draw(scores, Sampling(temperature=5), position) for position in range(200)} == {0, 2}


def test_a_tiny_temperature_is_greedy() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0])
    assert {draw(scores, Sampling(temperature=5e-324), position) for position in range(20)} == {1}


# One draw, wherever it is made


@given(st.lists(st.tuples(samplings, st.integers(0, 10**6)), min_size=1, max_size=6), st.integers(0, 9))
@settings(max_examples=60)
def test_a_draw_is_the_same_in_any_batch(wishes: list[tuple[Sampling, int]], seed: int) -> None:
    rows = torch.randn(len(wishes), 300, generator=torch.Generator().manual_seed(seed)) * 3
    alone = [draw(row, *wish) for row, wish in zip(rows, wishes, strict=True)]
    assert draw_rows(rows, *zip(*wishes, strict=True)) == alone
    assert draw_rows(rows.flip(0), *zip(*reversed(wishes), strict=True)) == alone[::-1]


def test_a_draw_is_the_same_on_any_number_of_threads() -> None:
    rows = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(0))
    wishes = [Sampling(top_p=0.9 if row % 2 else 1.0, seed=row) for row in range(4)]
    threads, drawn = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            drawn.append(draw_rows(rows, wishes, range(4)))
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_draw_is_the_same_on_an_accelerator() -> None:
    rows = torch.randn(64, 150_000, generator=torch.Generator().manual_seed(0)) * 2
    wishes = [
        Sampling(top_k=50 * (row % 2), top_p=(1.0, 0.9, 0.5)[row % 3], min_p=0.01 * (row % 5), seed=row)
        for row in range(64)
    ]
    assert draw_rows(rows.cuda(), wishes, range(64)) == draw_rows(rows, wishes, range(64))


@given(logits, samplings)
def test_logits_of_a_narrower_format_are_drawn_as_their_values(
    scores: torch.Tensor, sampling: Sampling
) -> None:
    narrow = scores.bfloat16()
    assert draw(narrow, sampling, 3) == draw(narrow.double(), sampling, 3)


def test_a_draw_within_inference_mode_leaves_tables_that_serve_outside_it() -> None:
    scores = torch.tensor([1.0, 2.0])
    with torch.inference_mode():
        inside = draw(scores, Sampling(top_p=0.9), 1)
    assert draw(scores, Sampling(top_p=0.9), 1) == inside


# What cannot be drawn


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_that_names_them(broken: float, temperature: float) -> None:
    rows = torch.tensor([[0.0, 1.0, 2.0], [0.0, broken, 1.0]])
    with pytest.raises(LogitsError, match=f"logits are not finite .that of token 1 is {broken}"):
        draw_rows(rows, [Sampling(temperature=temperature)] * 2, [0, 0])


def test_logits_that_rule_out_every_token_are_an_error() -> None:
    with pytest.raises(LogitsError, match="all are -inf"):
        draw(torch.full((3,), -math.inf), Sampling(), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(temperature=-1),
        Sampling(temperature=math.nan),
        Sampling(top_k=-1),
        Sampling(top_p=0),
        Sampling(min_p=2),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(wrong: Sampling) -> None:
    with pytest.raises(ValueError, match=r"^(temperature|top_k|top_p|min_p) = "):
        require_sampling(wrong)


# Many rows at once


@settings(max_examples=60)
@given(
    drawn=st.lists(st.tuples(logits, samplings, st.integers(0, 1000)), min_size=1, max_size=6),
    at_once=st.sampled_from([1, 50, 1 << 24]),
)
def test_rows_drawn_together_are_those_drawn_alone(
    drawn: list[tuple[torch.Tensor, Sampling, int]], at_once: int
) -> None:
    widest = max(len(scores) for scores, _, _ in drawn)
    padded = [
        torch.nn.functional.pad(scores, (0, widest - len(scores)), value=-math.inf) for scores, _, _ in drawn
    ]
    rows, options, positions = torch.stack(padded), [one for _, one, _ in drawn], [p for _, _, p in drawn]
    together = drawn_together(rows, options, positions, max_logits=at_once).tolist()
    assert together == [draw(*one) for one in zip(rows, options, positions, strict=True)]


def test_a_row_of_nothing_takes_no_other_row_along() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    options = [Sampling(top_p=0.9), Sampling(top_k=3, temperature=0.5), Sampling(min_p=0.1)]
    alone = drawn_together(rows, options, [1, 2, 3]).tolist()
    rows[1] = math.nan
    assert drawn_together(rows, options, [1, 2, 3])[0::2].tolist() == alone[0::2]

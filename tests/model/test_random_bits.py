"""Random numbers by index: those of SplitMix64, uniform, normal and independent."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

from phalanx.model.init import normal, normal_quantiles, random_words, stream_key

CUT = 3.0
COUNT = 1 << 17
WORD = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The generator's output for a state, as its authors write it in C, in whole numbers."""
    z = state & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def words(key: int, indices: Tensor) -> list[int]:
    return [word & WORD for word in random_words(key, indices).tolist()]


def sample(name: str = "blocks.3.ffn.up.weight", seed: int = 0, first: int = 0, stride: int = 1) -> Tensor:
    return normal(stream_key(seed, name), first + stride * torch.arange(COUNT))


@given(st.integers(0, WORD), st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_words_are_those_of_splitmix64_computed_in_whole_numbers(key: int, indices: list[int]) -> None:
    expected = [splitmix64(key + index * 0x9E3779B97F4A7C15) for index in indices]
    assert words(key, torch.tensor(indices)) == expected


def test_words_are_the_published_outputs_of_splitmix64() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64, seed 1234567; outputs count from 1.
    assert words(1234567, torch.arange(1, 6)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_each_of_the_64_bits_is_set_half_of_the_time() -> None:
    drawn = random_words(stream_key(0, "x"), torch.arange(COUNT))
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - COUNT / 2) < 4.5 * math.sqrt(COUNT) / 2, bit


def test_bits_of_neighboring_indices_are_independent() -> None:
    drawn = random_words(stream_key(0, "x"), torch.arange(COUNT + 1))
    flipped = drawn[1:] ^ drawn[:-1]
    for bit in range(64):
        changes = int(((flipped >> bit) & 1).sum())
        assert abs(changes - COUNT / 2) < 4.5 * math.sqrt(COUNT) / 2, bit


def test_streams_differ_by_seed_and_by_name() -> None:
    keys = {stream_key(seed, name) for seed in range(50) for name in ("a", "b", "1", "11")}
    assert len(keys) == 200
    # Seed and name are not simply joined.
    assert stream_key(1, "1x") != stream_key(11, "x")


def test_no_number_is_beyond_the_cut() -> None:
    low, high = float(sample().min()), float(sample().max())
    assert -CUT / truncated_deviation() <= low < -2.9
    assert 2.9 < high <= CUT / truncated_deviation()


def truncated_deviation() -> float:
    mass = NormalDist().cdf(CUT) - NormalDist().cdf(-CUT)
    return math.sqrt(1 - 2 * CUT * NormalDist().pdf(CUT) / mass)


def test_the_table_is_the_same_where_libraries_are_off_by_eight_ulp_of_a_probability() -> None:
    with mp.workprec(120):
        low, allowed = mp.ncdf(-CUT), mpf(2) ** -50
        deviation = mp.sqrt(1 - 2 * CUT * mp.npdf(CUT) / (1 - 2 * low))
        for place, entry in enumerate(normal_quantiles()):
            probability = low + (1 - 2 * low) * place / 4096
            below, above = (mp.ncdf((entry + side) * deviation / 2**30) for side in (mpf(-0.5), mpf(0.5)))
            assert below + allowed < probability < above - allowed, place


def test_numbers_follow_the_cut_normal_distribution() -> None:
    # Kolmogorov-Smirnov; exceeded with probability 0.001, and the sample is fixed.
    ordered = sample().sort().values
    scaled = ordered * truncated_deviation() / math.sqrt(2)
    low = NormalDist().cdf(-CUT)
    expected = (0.5 * (1 + torch.erf(scaled)) - low) / (1 - 2 * low)
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    distance = torch.maximum((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert float(distance) < 1.95 / math.sqrt(COUNT)


def test_moments_are_those_of_the_cut_normal_distribution() -> None:
    mass = NormalDist().cdf(CUT) - NormalDist().cdf(-CUT)
    fourth = 3 - 2 * (CUT**3 + 3 * CUT) * NormalDist().pdf(CUT) / mass
    kurtosis = fourth / truncated_deviation() ** 4
    drawn = sample()
    assert abs(float(drawn.mean())) < 4 / math.sqrt(COUNT)
    assert abs(float(drawn.var()) - 1) < 4 * math.sqrt((kurtosis - 1) / COUNT)
    assert abs(float((drawn**3).mean())) < 4 * math.sqrt(15 / COUNT)
    assert abs(float((drawn**4).mean()) - kurtosis) < 4 * math.sqrt(96 / COUNT)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_number_is_the_quantile_at_its_word(indices: list[int]) -> None:
    index = torch.tensor(indices)
    key = stream_key(0, "x")
    low = NormalDist().cdf(-CUT)
    for number, word in zip(normal(key, index).tolist(), words(key, index), strict=True):
        quantile = NormalDist().inv_cdf(low + (1 - 2 * low) * (word + 0.5) / 2**64) / truncated_deviation()
        # Between table points the quantile is a straight line, worst in the outermost cells.
        assert abs(number - quantile) < (1e-4 if abs(quantile) < 2.5 else 0.02)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (sample(), sample(first=1)),
        (sample(), sample(first=4096)),
        (sample(stride=4096), sample(stride=4096, first=1)),
        (sample(), sample(name="blocks.4.ffn.up.weight")),
        (sample(), sample(seed=1)),
        (sample(seed=0), sample(seed=2**40)),
        (sample(), sample(first=2**31)),
    ],
    ids=["next", "next row", "columns", "layers", "seeds", "far seeds", "far indices"],
)
def test_numbers_of_different_places_are_uncorrelated(left: Tensor, right: Tensor) -> None:
    for power in (1, 2):
        pair = torch.stack([left**power, right**power])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(COUNT)


def test_every_number_is_a_multiple_of_a_power_of_two_and_exact_in_fp64() -> None:
    scaled = sample() * 2.0**30
    assert torch.equal(scaled, scaled.round())


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_a_number_does_not_depend_on_the_others_that_are_drawn_with_it(indices: list[int]) -> None:
    key = stream_key(3, "y")
    together = normal(key, torch.tensor(indices))
    alone = torch.cat([normal(key, torch.tensor([index])) for index in indices])
    assert torch.equal(together, alone)

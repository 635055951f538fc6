"""The shuffle: a permutation for every size, the same from everywhere, and as random as it must be."""

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.data.order.permutation import (
    SORTED_UP_TO,
    SampleOrder,
    permute,
    permute_in_turn,
    place_in_permutation,
)

KEYS = st.integers(0, 2**64 - 1)
WORD = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def scalar_permute(x: int, n: int, key: int) -> int:
    """The cipher as its paper has it, one number at a time in Python's own integers."""
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=64, person=b"phalanx rounds").digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        right, left = divmod(x, a)
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                left = (left + mix(right ^ round_key)) % a
            else:
                right = (right + mix(left ^ round_key)) % b
        x = right * a + left
        if x < n:
            return x


def z_of_chi_square(counts: NDArray[np.int64], expected: float, degrees: int) -> float:
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@given(n=st.integers(1, 5000), key=KEYS)
def test_it_is_a_permutation_for_every_size(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n=n, key=key).tolist()) == list(range(n))


def test_it_is_a_permutation_at_sizes_around_squares_and_the_change_of_method() -> None:
    edges = {
        SORTED_UP_TO,
        *(root**2 for root in (32, 33, 64, 100)),
        *(root * (root + 1) for root in (33, 64)),
    }
    for n in (edge + step for edge in edges for step in (-1, 0, 1)):
        assert len(set(permute(np.arange(n), n=n, key=3).tolist())) == n


@settings(max_examples=50)
@given(n=st.integers(SORTED_UP_TO + 1, 2**62), key=KEYS, data=st.data())
def test_it_is_the_published_cipher_for_every_size_up_to_trillions(
    n: int, key: int, data: st.DataObject
) -> None:
    xs = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    assert permute(np.array(xs), n=n, key=key).tolist() == [scalar_permute(x, n, key) for x in xs]


@given(
    n=st.one_of(st.integers(1, 40), st.integers(SORTED_UP_TO - 1, SORTED_UP_TO + 20)),
    turns=st.lists(st.tuples(KEYS, st.integers(0, 5)), min_size=1, max_size=90),
    data=st.data(),
)
def test_several_permutations_in_turn_are_each_of_them(
    n: int, turns: list[tuple[int, int]], data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    parts = [generator.integers(0, n, count) for _, count in turns]
    turn = np.repeat(np.arange(len(turns)), [len(part) for part in parts])
    expected = [permute(part, n=n, key=key).tolist() for part, (key, _) in zip(parts, turns, strict=True)]
    permuted = permute_in_turn(np.concatenate(parts), turn, n=n, keys=[key for key, _ in turns])
    assert permuted.tolist() == [image for images in expected for image in images]


@given(st.integers(1, 10**15), st.integers(0, 2**64 - 1), st.data())
def test_where_an_image_comes_from_is_found_again(n: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    assert place_in_permutation(permute(index, n=n, key=key), n=n, key=key).tolist() == index.tolist()


@pytest.mark.parametrize("n", [24, 1025])
@pytest.mark.parametrize("shape", [(), (1,), (4, 3), (0, 2), (2, 3, 4)])
def test_positions_of_any_shape_have_images_of_that_shape(shape: tuple[int, ...], n: int) -> None:
    index = np.arange(math.prod(shape)).reshape(shape)
    images = permute(index, n=n, key=5)
    assert (images.shape, images.dtype) == (shape, np.int64)
    assert images.flatten().tolist() == permute(index.flatten(), n=n, key=5).tolist()
    places = place_in_permutation(images, n=n, key=5)
    assert places.shape == shape
    assert places.tolist() == index.tolist()


def test_no_two_of_a_million_positions_of_a_huge_dataset_meet() -> None:
    n = 10**13 + 37
    positions = np.concatenate([np.arange(500_000), n - 1 - np.arange(500_000)])
    places = permute(positions, n=n, key=1)
    assert len(np.unique(places)) == len(positions)
    assert places.min() >= 0
    assert places.max() < n


@given(n=st.integers(1, 200), seed=KEYS, batch=st.integers(1, 50), epoch=st.integers(0, 1000))
def test_every_sample_comes_exactly_once_an_epoch_however_it_is_cut(
    n: int, seed: int, batch: int, epoch: int
) -> None:
    order = SampleOrder(n, seed)
    start, stop = epoch * n, (epoch + 1) * n
    parts = [order.dataset_indices(i, min(batch, stop - i)) for i in range(start, stop, batch)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))


@given(
    n=st.integers(1, 3000),
    seed=KEYS,
    first=st.integers(0, 5000),
    sizes=st.lists(st.integers(0, 700), max_size=6),
)
def test_the_order_does_not_depend_on_how_the_run_is_cut(
    n: int, seed: int, first: int, sizes: list[int]
) -> None:
    order = SampleOrder(n, seed)
    starts = itertools.accumulate(sizes, initial=first)
    parts = [order.dataset_indices(start, size) for start, size in zip(starts, sizes, strict=False)]
    assert [i for part in parts for i in part.tolist()] == order.dataset_indices(first, sum(sizes)).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 2000
    orders = [SampleOrder(n, seed).dataset_indices(epoch * n, n) for seed in (0, 1) for epoch in (0, 1, 2)]
    for order, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(order == other) < 10  # two independent shuffles agree in one place on average


def test_the_order_is_that_of_earlier_releases() -> None:
    assert SampleOrder(10, 0).dataset_indices(0, 12).tolist() == [2, 9, 8, 7, 6, 5, 3, 1, 4, 0, 3, 6]
    assert SampleOrder(10**9, 7).dataset_indices(10**9 - 2, 4).tolist() == [
        564118273,
        693584468,
        46146548,
        406559154,
    ]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_a_handful_of_samples_comes_in_every_order_equally_often(n: int) -> None:
    orders = list(itertools.permutations(range(n)))
    each = 40
    counts = Counter(tuple(permute(np.arange(n), n=n, key=key).tolist()) for key in range(each * len(orders)))
    assert z_of_chi_square(np.array([counts[order] for order in orders]), each, len(orders) - 1) < 4


@pytest.mark.parametrize("n", [100_003, 1 << 17])
def test_blocks_of_the_shuffle_are_as_even_as_a_true_shuffle(n: int) -> None:
    blocks, expected, degrees = 32, n / 32**2, 31**2
    for key in range(4):
        places = permute(np.arange(n), n=n, key=key)
        for x, y in (
            (np.arange(n) * blocks // n, places * blocks // n),
            (np.arange(n) % blocks, places % blocks),
        ):
            counts = np.bincount(x * blocks + y, minlength=blocks**2)
            assert abs(z_of_chi_square(counts, expected, degrees)) < 4.5


def test_steps_between_neighbors_are_as_even_as_a_true_shuffle() -> None:
    n, bins = 100_003, 256
    for key in range(4):
        steps = np.diff(permute(np.arange(n), n=n, key=key)) % n
        counts = np.bincount(steps * bins // n, minlength=bins)
        assert abs(z_of_chi_square(counts, n / bins, bins - 1)) < 4.5


@pytest.mark.parametrize("index", [[-1], [5], [0, 7]])
def test_a_position_outside_the_dataset_is_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not all in \[0, 5\)"):
        permute(np.array(index), n=5, key=0)


@pytest.mark.parametrize(
    ("n", "seed", "name"), [(0, 0, "n"), (-3, 0, "n"), (5, -1, "seed"), (5, 2**64, "seed")]
)
def test_a_size_or_seed_out_of_range_is_refused_by_name(n: int, seed: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = "):
        SampleOrder(n, seed)

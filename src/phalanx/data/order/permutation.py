"""In which order a run sees the samples of its dataset: computed for any position, stored nowhere.

Shuffling by a stored list costs seconds and gigabytes to resume in the middle of, and ties the order to whoever
holds the list. Here the shuffle is a keyed pseudo-random permutation: the place of sample *i* is computed from
(seed, epoch, *i*) alone, so any rank of any fleet can ask for any stretch of the run, and resuming is free.

The permutation is the generalized Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002). A position x < n is written as a pair (left, right) in a grid of a x b >= n cells; each round adds a
keyed hash of one half to the other, modulo that half's size, which can be undone and so is a permutation of the grid.
Whoever lands outside n is sent through again until inside ("cycle walking"); as a is the root of n rounded up, fewer
than one in sqrt(n) cells are outside. The hash is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
Eight rounds reach every permutation of a handful of items, but not equally often (a chi-square over all orders of six
items is off by hundreds of standard deviations), so up to ``SORTED_UP_TO`` samples the order is a sort by keyed hash.

The order is part of what a run's bits depend on: changing any constant here changes every run.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A BLAKE2b digest holds exactly eight 64-bit keys; four rounds already pass the tests against a true shuffle.
ROUNDS = 8
# Pairs of positions are visibly biased up to about 16 items; a sort of this many hashes still costs microseconds.
SORTED_UP_TO = 1024
_SORTED_TOGETHER = 1 << 16
"""Hashes that are sorted at once, where several small permutations are asked for: half a MiB of them."""
MAX_SAMPLES = 2**62


def permute(index: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """The images of ``index`` under the keyed permutation of ``range(n)``.

    ``index`` has any shape, with values in [0, n); the result has the same shape and dtype int64. ``key`` is in
    [0, 2**64). Costs about 8 hash evaluations per element and nothing that grows with n.
    Raises ``ValueError`` for a value out of range.
    """
    _require_range("n", n, 1, MAX_SAMPLES)
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"positions {index.min()}..{index.max()} are not all in [0, {n})")
    round_keys = _round_keys(key)
    if n <= SORTED_UP_TO:
        order: NDArray[np.int64] = _orders_by_hash(n, round_keys[None])[0]
        return order[index]
    moved = _feistel(index.ravel().astype(np.uint64), n, round_keys)
    outside = np.flatnonzero(moved >= n)
    while outside.size:
        moved[outside] = _feistel(moved[outside], n, round_keys)
        outside = outside[moved[outside] >= n]
    return moved.astype(np.int64).reshape(index.shape)


def permute_in_turn(
    index: NDArray[np.int64], turn: NDArray[np.int64], *, n: int, keys: Sequence[int]
) -> NDArray[np.int64]:
    """The images of ``index`` under several permutations of ``range(n)``: of ``index[i]`` under that with ``keys[turn[i]]``.

    As ``permute`` for one key after the other, and much quicker where ``n`` is small and the keys are many. Both arrays have one
    dimension; ``turn`` does not decrease.
    """
    if n > SORTED_UP_TO and keys:
        edges = np.searchsorted(turn, np.arange(1, len(keys)))
        parts = zip(np.split(index, edges), keys, strict=True)
        return np.concatenate([permute(part, n=n, key=key) for part, key in parts])
    images = np.empty_like(index)
    together = max(1, _SORTED_TOGETHER // n)
    for first in range(0, len(keys), together):
        round_keys = np.stack([_round_keys(key) for key in keys[first : first + together]])
        of_these = slice(*np.searchsorted(turn, (first, first + together)))
        images[of_these] = _orders_by_hash(n, round_keys)[turn[of_these] - first, index[of_these]]
    return images


def place_in_permutation(image: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """The inverse of ``permute``: where each of ``image`` comes from. The same shapes, cost and errors."""
    _require_range("n", n, 1, MAX_SAMPLES)
    if image.size and (image.min() < 0 or image.max() >= n):
        raise ValueError(f"images {image.min()}..{image.max()} are not all in [0, {n})")
    round_keys = _round_keys(key)
    if n <= SORTED_UP_TO:
        return np.argsort(_orders_by_hash(n, round_keys[None])[0]).astype(np.int64)[image]
    moved = _feistel_inverse(image.ravel().astype(np.uint64), n, round_keys)
    outside = np.flatnonzero(moved >= n)
    while outside.size:
        moved[outside] = _feistel_inverse(moved[outside], n, round_keys)
        outside = outside[moved[outside] >= n]
    return moved.astype(np.int64).reshape(image.shape)


def key_of(purpose: str, seed: int, number: int, name: str = "") -> int:
    """The key of one of a run's permutations: its purpose (at most 8 ASCII letters), the run's seed, a number and a name."""
    message = seed.to_bytes(8, "little") + number.to_bytes(8, "little") + name.encode()
    digest = hashlib.blake2b(message, digest_size=8, person=f"phalanx {purpose}".encode()).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class SampleOrder:
    """The order of a run over a dataset of ``n`` samples: every epoch a permutation of its own."""

    n: int
    """Samples in the dataset; at least 1."""
    seed: int
    """The run's data seed: any integer in [0, 2**64)."""

    def __post_init__(self) -> None:
        _require_range("n", self.n, 1, MAX_SAMPLES)
        _require_range("seed", self.seed, 0, 2**64 - 1)

    def dataset_indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Which dataset samples the run's samples ``first`` to ``first + count`` are; shape (count,), int64.

        Run sample i is in epoch i // n. Neighboring stretches join up however the run is cut into batches.
        """
        _require_range("first", first, 0, MAX_SAMPLES)
        _require_range("count", count, 0, MAX_SAMPLES)
        indices = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, position = divmod(first + done, self.n)
            take = min(count - done, self.n - position)
            positions = np.arange(position, position + take, dtype=np.int64)
            indices[done : done + take] = permute(positions, n=self.n, key=key_of("epoch", self.seed, epoch))
            done += take
        return indices


def _feistel(x: NDArray[np.uint64], n: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass through the cipher over the smallest near-square grid that holds n cells."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    columns, rows = np.array(a, np.uint64), np.array(b, np.uint64)
    right = x // columns
    left = x - right * columns
    for number in range(ROUNDS):
        if number % 2 == 0:
            left = _added(left, _mix(right ^ round_keys[number, ...]), columns)
        else:
            right = _added(right, _mix(left ^ round_keys[number, ...]), rows)
    cells: NDArray[np.uint64] = right * columns + left
    return cells


def _feistel_inverse(x: NDArray[np.uint64], n: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The rounds of ``_feistel`` undone, the last first."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    columns, rows = np.array(a, np.uint64), np.array(b, np.uint64)
    right = x // columns
    left = x - right * columns
    for number in reversed(range(ROUNDS)):
        if number % 2 == 0:
            left = _subtracted(left, _mix(right ^ round_keys[number, ...]), columns)
        else:
            right = _subtracted(right, _mix(left ^ round_keys[number, ...]), rows)
    cells: NDArray[np.uint64] = right * columns + left
    return cells


def _added(
    half: NDArray[np.uint64], hashed: NDArray[np.uint64], size: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """``(half + hashed) % size`` for halves below ``size``, which is below 2**32; ``hashed`` is overwritten.

    NumPy divides an array by one number with multiplications, several at a time, and has only the processor's slow division for a
    remainder. A sum below twice the size needs none: from less than the size, the size is subtracted to a number near 2**64.
    """
    _reduce(hashed, size)
    hashed += half
    np.minimum(hashed, hashed - size, out=hashed)
    return hashed


def _subtracted(
    half: NDArray[np.uint64], hashed: NDArray[np.uint64], size: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """``(half - hashed) % size``, as ``_added``."""
    _reduce(hashed, size)
    np.subtract(half, hashed, out=hashed)
    np.minimum(hashed, hashed + size, out=hashed)
    return hashed


def _reduce(values: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    """``values %= size``, quicker."""
    quotients = values // size
    quotients *= size
    values -= quotients


def _orders_by_hash(n: int, round_keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """All of small permutations at once, one for each row of ``round_keys``: (rows, n). The hash is one-to-one, so that no two items tie."""
    first, second = round_keys[:, :1], round_keys[:, 1:2]
    return np.argsort(_mix(_mix(np.arange(n, dtype=np.uint64) ^ first) ^ second), axis=1).astype(np.int64)


# Arrays without dimensions, which NumPy takes in half of the time that a number of its own takes.
_SHIFTS = tuple(np.array(shift, np.uint64) for shift in (30, 27, 31))
_FACTORS = tuple(np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: every input bit changes every output bit with probability near one half."""
    mixed = x >> _SHIFTS[0]
    mixed ^= x
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def _round_keys(key: int) -> NDArray[np.uint64]:
    _require_range("key", key, 0, 2**64 - 1)
    digest = hashlib.blake2b(
        key.to_bytes(8, "little"), digest_size=8 * ROUNDS, person=b"phalanx rounds"
    ).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is not in [{low}, {high}]")

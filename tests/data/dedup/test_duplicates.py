"""Copies are found, those that are not are left alone, and sketches are the same in every release."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.dedup import (
    HASH_DTYPE,
    all_but_the_first,
    band_rows,
    hash_of,
    later_copies,
    normal_form,
    signature,
    similar_pairs,
)

GOLDEN = [3416254241, 3298934994, 3190686803, 3448217988]  # rensa 0.5.0
BANDS, ROWS, NGRAM, LEAST = 14, 8, 5, 0.65


def pair_with_similarity(common: int, grams: int, seed: int, *, spaced: bool = True) -> tuple[str, str]:
    """Two texts of ``grams`` different 5-grams each, of which they have ``common``: their Jaccard similarity is common / (2 grams - common).

    The 5-grams are of words, or of Chinese letters where the texts are not ``spaced``.
    """
    draw = random.Random(seed)
    count = 2 * grams + 4 - common
    words = [
        f"{seed}x{draw.getrandbits(40):x}" if spaced else chr(draw.randrange(0x4E00, 0x9FFF))
        for _ in range(count)
    ]
    space = " " if spaced else ""
    return space.join(words[: grams + 4]), space.join(words[: common + 4] + words[grams + 4 :])


def share_found(common: int, grams: int, pairs: int, *, spaced: bool) -> float:
    """The share of pairs of this similarity that are found to be near duplicates."""
    texts = [
        text for seed in range(pairs) for text in pair_with_similarity(common, grams, seed, spaced=spaced)
    ]
    rows = [band_rows(signature(text, BANDS * ROWS, NGRAM), i, BANDS, ROWS) for i, text in enumerate(texts)]
    entries = np.concatenate(rows)
    similar = similar_pairs(entries, entries["ordinal"].astype(np.uint64), BANDS * ROWS, LEAST)
    assert all(second == first + 1 and first % 2 == 0 for first, second in similar.tolist())
    return len(similar) / pairs


@pytest.mark.parametrize("spaced", [True, False])
def test_texts_of_similarity_085_are_found_and_those_of_05_are_not(spaced: bool) -> None:
    assert share_found(common=368, grams=400, pairs=400, spaced=spaced) >= 0.95
    assert share_found(common=267, grams=400, pairs=400, spaced=spaced) <= 0.05


def test_a_signature_is_that_of_every_other_release() -> None:
    values = signature(normal_form("The quick brown fox jumps over\n the lazy dog."), 112, 5)
    assert values[:4].tolist() == GOLDEN
    assert (
        signature(normal_form("the QUICK brown fox jumps over the lazy dog."), 112, 5).tolist()
        == values.tolist()
    )


def test_the_estimate_of_the_similarity_is_as_exact_as_its_permutations_allow() -> None:
    errors = []
    for seed in range(150):
        common = 40 + 2 * seed
        ours, other = (signature(text, 112, 5) for text in pair_with_similarity(common, 400, seed))
        errors.append(float((ours == other).mean()) - common / (800 - common))
    # sqrt(J (1 - J) / 112) is 0.047 at most, and 0.041 on average here.
    assert np.sqrt(np.mean(np.square(errors))) < 0.055
    assert abs(np.mean(errors)) < 0.015


@given(st.lists(st.text(max_size=6), max_size=40))
def test_exact_copies_are_those_whose_normal_form_was_there_before(texts: list[str]) -> None:
    hashes = np.array([(*hash_of(normal_form(text)), i) for i, text in enumerate(texts)], dtype=HASH_DTYPE)
    forms = [normal_form(text) for text in texts]
    order = np.random.default_rng(0).permutation(len(texts))
    copies = later_copies(hashes[order], order.astype(np.uint64))
    assert copies.tolist() == [i for i, form in enumerate(forms) if form in forms[:i]]


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("a  b\n\tc ", "a b c", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("a b", "ab", False),
        ("A", "a", False),
    ],
)
def test_white_space_and_ways_to_write_a_character_make_no_difference(
    text: str, other: str, same: bool
) -> None:
    assert (hash_of(normal_form(text)) == hash_of(normal_form(other))) is same


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60))
def test_all_but_the_lowest_of_a_cluster_go(pairs: list[tuple[int, int]]) -> None:
    cluster = {node: {node} for pair in pairs for node in pair}
    for first, second in pairs:
        joined = cluster[first] | cluster[second]
        for node in joined:
            cluster[node] = joined
    expected = sorted(node for node, nodes in cluster.items() if node != min(nodes))
    assert all_but_the_first(np.array(pairs, dtype=np.uint64)).tolist() == expected


def test_a_long_chain_is_one_cluster() -> None:
    nodes = np.random.default_rng(1).permutation(20_000).astype(np.uint64)
    pairs = np.stack([nodes[:-1], nodes[1:]], axis=1)
    assert all_but_the_first(pairs).tolist() == list(range(1, 20_000))

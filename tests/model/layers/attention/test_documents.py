"""Attention by document: where documents lie, and that each is computed as if it stood alone."""

from __future__ import annotations

from itertools import groupby

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.layers.attention.attention import CausalCore, Documents

rows = st.integers(1, 12).flatmap(
    lambda seq: st.lists(st.lists(st.integers(0, 2), min_size=seq, max_size=seq), min_size=1, max_size=3)
)


@given(rows)
def test_lengths_are_those_of_runs_of_equal_numbers_sequence_after_sequence(ids: list[list[int]]) -> None:
    expected = [len(list(run)) for row in ids for _, run in groupby(row)]
    assert list(Documents.numbered(torch.tensor(ids)).lengths) == expected


def test_the_bits_of_a_document_do_not_depend_on_those_packed_beside_it() -> None:
    query, key, value = torch.randn(3, 2, 4, 300, 16).unbind()
    documents = Documents.numbered((torch.arange(300) >= 170).long().expand(2, -1))
    core = CausalCore(window=50)
    both = core(query, key, value, documents)
    alone = core(*(x[1:, :, 170:].contiguous() for x in (query, key, value)))
    assert torch.equal(both[1:, :, 170:], alone)


def test_memory_does_not_grow_with_the_square_of_the_sequence() -> None:
    seq = 1 << 17
    query, key, value = torch.randn(3, 1, 1, seq, 8).unbind()
    documents = Documents.numbered((torch.arange(seq) // 512)[None])
    # A mask would have 2^34 bytes.
    with torch.profiler.profile(profile_memory=True) as profile:
        CausalCore()(query, key, value, documents)
    largest = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert largest <= 16 * query.nbytes

"""Each rank holds a run of context tiles, which has the tokens that balance gives it anyhow."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.context.exchange import context_positions
from phalanx.parallel.context.fixed_tiles import by_position, by_tile, tiled_positions


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tokens of a sequence, its tiles, and a context degree that divides these."""
    context = 2 ** draw(st.integers(0, 3))
    tiles = context * 2 ** draw(st.integers(0, 2))
    return 2 * tiles * draw(st.integers(1, 3)), tiles, context


@given(cuts())
def test_a_rank_holds_the_tokens_of_head_and_tail(cut: tuple[int, int, int]) -> None:
    seq_len, tiles, context = cut
    for rank in range(context):
        positions = tiled_positions(seq_len, tiles, context, rank)
        assert torch.equal(positions.sort().values, context_positions(seq_len, context, rank))


@given(cuts())
def test_ranks_hold_the_tiles_of_one_rank_in_their_order(cut: tuple[int, int, int]) -> None:
    seq_len, tiles, context = cut
    parts = [tiled_positions(seq_len, tiles, context, rank) for rank in range(context)]
    assert torch.equal(torch.cat(parts), tiled_positions(seq_len, tiles, 1, 0))


@given(cuts())
def test_the_order_of_tiles_can_be_undone(cut: tuple[int, int, int]) -> None:
    seq_len, tiles, _ = cut
    sequences = torch.arange(2 * seq_len).view(2, seq_len)
    assert torch.equal(by_position(by_tile(sequences, tiles, dim=1), tiles, dim=1), sequences)

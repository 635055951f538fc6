"""Attention in tiles, in one process: on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.model.layers.attention.attend import Score
from phalanx.parallel.context.tiles import MaskRule, OnlineSoftmax, SavedAttention, Tile

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
SEQ, CUT, SCALE = 72, 40, 0.25
SCORE = Score(SCALE)
TILES = (
    Tile(slice(0, CUT), slice(0, CUT), causal=True),
    Tile(slice(CUT, SEQ), slice(0, CUT)),
    Tile(slice(CUT, SEQ), slice(CUT, SEQ), causal=True),
)


def inputs(width: int, value_width: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query of 4 heads, key and value of 2, upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width), (4, value_width))
    drawn = (torch.randn(2, heads, SEQ, w, generator=generator) for heads, w in shapes)
    return tuple(x.to(device, dtype) for x in drawn)


def by_definition(*x: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
    """Output and gradients of masked attention, in fp64."""
    query, key, value, upstream = (t.detach().double().cpu() for t in x)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    keys, values = (t.repeat_interleave(2, 1) for t in (key, value))
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :]).cpu()
    scores = (query @ keys.transpose(-1, -2) * SCALE).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ values
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def in_tiles(*x: Tensor, documents: Tensor | None, order: tuple[Tile, ...] = TILES) -> tuple[Tensor, ...]:
    """The same by tiles."""
    query, key, value, upstream = x
    places = torch.arange(query.shape[2])
    mask = MaskRule(places, places, documents=None if documents is None else (documents, documents))
    rows = OnlineSoftmax(query, value.shape[-1])
    for tile in order:
        rows.add(tile.rows, *tile.forward(query, key, value, mask, SCORE))
    saved = SavedAttention(query, rows.out.to(query.dtype), rows.lse)
    sums = [torch.zeros_like(t, dtype=torch.float32) for t in (query, key, value)]
    for tile in order:
        shares = tile.backward(saved, upstream, key, value, mask, SCORE)
        for total, part, share in zip(sums, (tile.rows, tile.columns, tile.columns), shares, strict=True):
            total[:, :, part] += share
    return saved.out, *sums


def worst(ours: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> float:
    return max(
        float((a.detach().double().cpu() - b).abs().max() / b.abs().max())
        for a, b in zip(ours, reference, strict=True)
    )


def documents_on(device: str) -> Tensor:
    """Ends before, at and after the cut between the tiles."""
    ends = torch.zeros(2, SEQ, dtype=torch.int64)
    ends[0, [7, CUT, CUT + 1]], ends[1, [CUT - 9, CUT + 13]] = 1, 1
    return ends.cumsum(1).to(device)


@devices
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (12, 20)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_tiles_add_up_to_attention(
    device: str, widths: tuple[int, int], masked: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x = inputs(*widths, device, dtype)
    documents = documents_on(device) if masked else None
    assert worst(in_tiles(*x, documents=documents), by_definition(*x, documents=documents)) <= tolerance


@devices
def test_a_tile_in_which_a_row_sees_nothing_may_come_first(device: str) -> None:
    x = inputs(16, 16, device, torch.float32)
    documents = torch.zeros(2, SEQ, dtype=torch.int64, device=device)
    documents[:, CUT:] = 1
    unseen_first = (TILES[1], TILES[0], TILES[2])
    result = in_tiles(*x, documents=documents, order=unseen_first)
    assert worst(result, by_definition(*x, documents=documents)) <= 2e-6


@devices
def test_a_tile_in_which_a_row_sees_nothing_changes_no_bit(device: str) -> None:
    x = inputs(16, 16, device, torch.float32)
    documents = torch.zeros(2, SEQ, dtype=torch.int64, device=device)
    documents[:, CUT:] = 1
    with_it = in_tiles(*x, documents=documents)
    without = in_tiles(*x, documents=documents, order=(TILES[0], TILES[2]))
    assert all(map(torch.equal, with_it, without))

"""Gradients of lanes' rows are written side by side into one tensor, with the bits of those that are computed apart and copied together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.linear import Linear
from phalanx.parallel.tensor.lanes.layers import LaneParameter
from phalanx.parallel.tensor.lanes.rows import LaneRows

LANES = 4


def computed(
    dtype: torch.dtype, *, apart: bool, twice: bool = False, rows_of_lane: int = 8, width: int = 16
) -> tuple[Tensor, Tensor]:
    """The gradients of a matrix, of which lanes have rows, and of what they read."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(width, rows_of_lane * LANES, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    rows = None if apart else LaneRows()
    layer.affine = rows
    x = torch.randn(2, 50, width, generator=generator).to(dtype).requires_grad_()
    results = []
    for lane, (own,) in enumerate(LaneParameter(layer, "weight", 0, LANES, rows=rows).of_lanes()):
        if rows is not None:
            rows.lane = lane
        product = F.linear if rows is None else rows
        y = product(x, own, None)
        results.append(product(y[..., :1].expand(2, 50, width), own, None) if twice else y)
    torch.cat(results, -1).square().sum().backward()
    assert layer.weight.grad is not None
    assert x.grad is not None
    return layer.weight.grad, x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("twice", [False, True])
def test_they_have_the_same_bits(dtype: torch.dtype, twice: bool) -> None:
    together, apart = (computed(dtype, apart=each, twice=twice) for each in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


@pytest.mark.parametrize("width", [1, 5, 7, 8, 40, 65])
def test_they_have_the_same_bits_where_a_lanes_rows_would_begin_within_a_cache_line(width: int) -> None:
    for rows in (1, 3, 5, 7, 9, 33):
        together, apart = (
            computed(torch.float32, apart=each, rows_of_lane=rows, width=width)[0] for each in (False, True)
        )
        assert torch.equal(together, apart)


def test_nothing_is_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    cat = torch.cat

    def counted(tensors: list[Tensor], dim: int = 0) -> Tensor:
        copied.append(tuple(tensors[0].shape))
        return cat(tensors, dim)

    monkeypatch.setattr(torch, "cat", counted)
    computed(torch.float32, apart=False)
    assert copied == [(2, 50, 8)], "of the results alone"
    computed(torch.float32, apart=True)
    assert copied[1:] == [(2, 50, 8), (8, 16)]

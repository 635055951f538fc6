"""Gradients of lanes' rows are written side by side into one tensor, with the bits of those that are computed apart and copied together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.dense import Linear
from phalanx.parallel.tensor.lanes.layers import LaneParameter, LaneRows
from phalanx.parallel.tensor.sequence_comm import dense

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
    assert all(torch.equal(left, right) for left, right in zip(together, apart, strict=True))


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


@pytest.mark.parametrize("width", [33, 47, 51])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_lane_has_the_bits_that_it_has_on_a_rank_of_its_own(width: int, side_by_side: bool) -> None:
    # Its rows begin within a cache line where its rank has those before them too.
    for rows_of_lane in (1, 7):
        generator = torch.Generator().manual_seed(rows_of_lane)
        layer = Linear(width, rows_of_lane * LANES, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        rows = LaneRows() if side_by_side else None
        x = torch.randn(1, 50, width, generator=generator)
        slope = torch.randn(1, 50, rows_of_lane, generator=generator)
        gradients = []
        for lane, (own,) in enumerate(LaneParameter(layer, "weight", 0, LANES, rows=rows).of_lanes()):
            if rows is not None:
                rows.lane = lane
            here, there = (x.clone().requires_grad_() for _ in range(2))
            matrix = layer.weight[lane * rows_of_lane : (lane + 1) * rows_of_lane]
            matrix = matrix.detach().clone().requires_grad_()
            y = F.linear(here, own) if rows is None else rows(here, own, None)
            expected = F.linear(there, matrix)
            assert torch.equal(y, expected)
            y.backward(slope, retain_graph=True)
            expected.backward(slope)
            assert here.grad is not None
            assert there.grad is not None
            assert torch.equal(here.grad, there.grad)
            assert matrix.grad is not None
            gradients.append(matrix.grad)
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, torch.cat(gradients))


@pytest.mark.parametrize("count", [3, 7, 33])
def test_a_piece_of_a_tensor_is_given_to_kernels_at_a_boundary_of_memory(count: int) -> None:
    tensor = torch.randn(4, count, requires_grad=True)
    for number, piece in enumerate(tensor.chunk(4)):
        own = dense(piece)
        assert own.is_contiguous()
        assert own.data_ptr() % 64 == 0
        assert torch.equal(own, tensor[number : number + 1])
    fitting = torch.randn(4, 16)
    assert all(dense(piece).data_ptr() == piece.data_ptr() for piece in fitting.chunk(4)), "nothing is copied"

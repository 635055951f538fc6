"""RMSNorm against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.model.layers.dense import RMSNorm


def both(shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> tuple[list[torch.Tensor], ...]:
    """Output and gradients of ours and of ``F.rms_norm``."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator).to(dtype)
    upstream = torch.randn(shape, generator=generator).to(dtype)
    norm = RMSNorm(shape[-1], 1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=generator))
    norm.to(dtype)
    results = []
    for apply in (norm, lambda x: F.rms_norm(x, x.shape[-1:], norm.weight, 1e-5)):
        norm.weight.grad = None
        x = values.clone().requires_grad_()
        seen = x.transpose(0, 1) if transposed else x
        y = apply(seen)
        y.backward(upstream.transpose(0, 1) if transposed else upstream)
        assert x.grad is not None
        assert norm.weight.grad is not None
        results.append([y.detach(), x.grad, norm.weight.grad])
    return results[0], results[1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 1, 7), (4, 2, 3, 8)])
def test_values_and_gradients_are_pytorchs(shape: tuple[int, ...], transposed: bool) -> None:
    ours, theirs = both(shape, torch.float32, transposed=transposed)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_other_formats_are_left_to_pytorch() -> None:
    ours, theirs = both((2, 3, 8), torch.bfloat16, transposed=False)
    assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dim", [7, 64, 256, 1000])
def test_values_have_the_bits_of_pytorchs(dim: int) -> None:
    ours, theirs = both((2, 9, dim), torch.float32, transposed=False)
    assert torch.equal(ours[0], theirs[0])

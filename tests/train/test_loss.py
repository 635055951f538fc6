"""Chunked cross-entropy against PyTorch's, which holds all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.loss import IGNORE, summed_cross_entropy


def case(batch: int, seq: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, seq, 8, generator=generator, requires_grad=True)
    weight = torch.randn(31, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 31, (batch, seq), generator=generator)
    return hidden, weight, targets


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(0, 5))
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    batch: int, seq: int, chunk: int, seed: int
) -> None:
    hidden, weight, targets = case(batch, seq, seed)
    targets[0, 0] = IGNORE
    (summed_cross_entropy(hidden, weight, targets, chunk) * 0.3).backward()
    ours = [hidden.grad, weight.grad]
    reference_hidden, reference_weight, _ = case(batch, seq, seed)
    scores = F.linear(reference_hidden, reference_weight).flatten(0, 1)
    expected = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (expected * 0.3).backward()
    torch.testing.assert_close(
        summed_cross_entropy(hidden, weight, targets, chunk), expected, rtol=1e-5, atol=1e-5
    )
    for mine, theirs in zip(ours, [reference_hidden.grad, reference_weight.grad], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_autograd_agrees_with_finite_differences() -> None:
    hidden, weight, targets = case(2, 3, 0)
    # The loss itself is summed in fp32, so the check runs on values exactly representable there.
    ours = summed_cross_entropy(hidden, weight, targets, 2)
    (gradient,) = torch.autograd.grad(ours, hidden)
    step = torch.zeros_like(hidden)
    step[1, 1, 3] = 1e-2
    with torch.no_grad():
        above = summed_cross_entropy(hidden + step, weight, targets, 2)
        below = summed_cross_entropy(hidden - step, weight, targets, 2)
    assert ((above - below) / 2e-2).item() == pytest.approx(gradient[1, 1, 3].item(), rel=1e-2)


def test_ignored_targets_take_no_part() -> None:
    hidden, weight, targets = case(1, 4, 1)
    nothing = torch.full_like(targets, IGNORE)
    loss = summed_cross_entropy(hidden, weight, nothing, 2)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_narrow_formats_keep_the_loss_in_fp32() -> None:
    hidden, weight, targets = case(2, 5, 2)
    narrow_hidden = hidden.detach().bfloat16().requires_grad_()
    narrow_weight = weight.detach().bfloat16().requires_grad_()
    loss = summed_cross_entropy(narrow_hidden, narrow_weight, targets, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert narrow_weight.grad is not None
    assert narrow_weight.grad.dtype == torch.bfloat16
    exact = summed_cross_entropy(hidden, weight, targets, 4)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)


def test_nothing_is_computed_for_gradients_that_nobody_wants() -> None:
    hidden, weight, targets = case(1, 4, 3)
    with torch.no_grad():
        loss = summed_cross_entropy(hidden, weight, targets, 2)
    assert not loss.requires_grad

"""Chunked cross-entropy against PyTorch's, which holds all logits; on one rank, and with the vocabulary divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.hardware.local.device import CommClock
from phalanx.parallel.mesh import piece
from phalanx.parallel.tensor.apply import VocabularyPiece
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.train.step.loss import IGNORE, summed_cross_entropy
from ranks import Ranks


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


@pytest.mark.parametrize("chunk", [4, 40])
def test_a_soft_cap_bends_the_logits_before_the_loss(chunk: int) -> None:
    hidden, weight, targets = case(2, 7, 0)
    ours = summed_cross_entropy(hidden, weight, targets, chunk, cap=1.5)
    scores = 1.5 * torch.tanh(F.linear(hidden, weight).flatten(0, 1) / 1.5)
    expected = F.cross_entropy(scores, targets.flatten(), reduction="sum")
    torch.testing.assert_close(ours, expected)
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


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


VOCABULARY = 31
"""Rows that neither two ranks nor three can divide evenly."""


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(tuple(result.shape))
        return result


def divided(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int
) -> tuple[float, torch.Tensor, torch.Tensor, set[tuple[int, ...]]]:
    """The loss, this rank's part of the gradients, and the shapes of all tensors that were made on the way."""
    group = dist.group.WORLD
    assert group is not None
    rank, count = dist.get_rank(), dist.get_world_size()
    rows = piece(VOCABULARY, rank, count)
    mine = hidden.detach().chunk(count, dim=1)[rank].clone().requires_grad_()
    part = weight.detach()[rows.start : rows.stop].clone().requires_grad_()
    place = VocabularyPiece(rows.start, SequenceComm(group, CommClock(blocking=True)))
    with Shapes() as shapes:
        loss = summed_cross_entropy(mine, part, targets, chunk, place)
        (loss * 0.3).backward()
    assert mine.grad is not None
    assert part.grad is not None
    return loss.item(), mine.grad, part.grad, shapes.seen


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    scores = F.linear(hidden, weight).flatten(0, 1)
    loss = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss * 0.3).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.item(), hidden.grad, weight.grad


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("chunk", [4, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_divided_vocabulary_gives_the_loss_and_gradients_of_a_whole_one(
    ranks: Ranks, count: int, chunk: int, scale: float
) -> None:
    hidden, weight, targets = case(2, 12, 4)
    targets[1, 2] = IGNORE
    # In sixteenths, so that even large scores are exact, and only what is made of them can differ.
    hidden, weight = ((tensor.detach() * 16).round() / 16 for tensor in (hidden, weight))
    hidden *= scale  # when large, most ranks' exponentials vanish against one's
    loss, grad_hidden, grad_weight = whole(hidden, weight, targets)
    results = ranks.run(count, divided, hidden, weight, targets, chunk)
    assert {result[0] for result in results} == {results[0][0]}
    assert results[0][0] == pytest.approx(loss, rel=2e-6)
    for ours, expected in (
        (torch.cat([result[1] for result in results], dim=1), grad_hidden),
        (torch.cat([result[2] for result in results]), grad_weight),
    ):
        assert (ours - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_no_rank_holds_scores_of_the_whole_vocabulary(ranks: Ranks) -> None:
    hidden, weight, targets = case(2, 12, 5)
    for *_, shapes in ranks.run(2, divided, hidden.detach(), weight.detach(), targets, 7):
        assert not any(VOCABULARY in shape for shape in shapes)
        assert (7, 16) in shapes or (7, 15) in shapes, "scores of a chunk for this rank's rows"


def divided_without_gradient(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[bool, float]:
    with torch.no_grad():
        group = dist.group.WORLD
        assert group is not None
        rows = piece(VOCABULARY, dist.get_rank(), 2)
        mine = hidden.chunk(2, dim=1)[dist.get_rank()]
        place = VocabularyPiece(rows.start, SequenceComm(group, CommClock(blocking=True)))
        loss = summed_cross_entropy(mine, weight[rows.start : rows.stop], targets, 5, place)
    return loss.requires_grad, loss.item()


def test_a_divided_vocabulary_serves_evaluation_and_narrow_formats(ranks: Ranks) -> None:
    hidden, weight, targets = case(2, 12, 6)
    expected, _, _ = whole(hidden, weight, targets)
    narrow = (hidden.detach().bfloat16(), weight.detach().bfloat16(), targets)
    for requires_grad, loss in ranks.run(2, divided_without_gradient, *narrow):
        assert not requires_grad
        assert loss == pytest.approx(expected, rel=2e-2)

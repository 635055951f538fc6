"""Predictions ahead: each depth sees one token further, and nothing beyond what it is to predict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.initialized import initialized
from phalanx.model.transformer import targets_ahead, tokens_ahead, training_loss
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

SPEC = ModelSpec(
    layers=2,
    dim=32,
    heads=4,
    vocab_size=40,
    init_std=0.3,
    mla=MlaSpec(kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=6),
    moe=MoeSpec(experts=4, ffn_dim=16, first_dense=1),
    mtp_depth=2,
)
TEXT = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(0))


def states(text: Tensor) -> list[Tensor]:
    """The hidden states that each readout is given: of the main model, of depth 1, of depth 2."""
    seen: list[Tensor] = []

    def readout(hidden: Tensor, weight: Tensor) -> Tensor:
        assert weight.shape == (40, 32)
        seen.append(hidden)
        return hidden.sum()

    def ahead(hidden: Tensor, weight: Tensor, depth: int) -> Tensor:
        assert depth == len(seen)
        return readout(hidden, weight)

    with torch.no_grad():
        assert initialized(SPEC)(text, readout, ahead=ahead).shape == (3,)
    return seen


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_depth_sees_so_many_tokens_further_and_no_more(depth: int) -> None:
    changed = TEXT.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 40
    differs = (states(TEXT)[depth] - states(changed)[depth]).abs().amax(dim=(0, 2)) > 1e-4
    # The last positions of a depth have no token that far ahead, and count for nothing.
    positions = range(12 - depth)
    assert [bool(differs[i]) for i in positions] == [i >= 7 - depth for i in positions]


def test_without_a_readout_for_them_no_prediction_is_made() -> None:
    model = initialized(SPEC)
    called: list[str] = []
    model.mtp[0].register_forward_hook(lambda *_: called.append("depth 1"))
    assert model(TEXT).shape == (1, 12, 40)
    assert not called


def test_tokens_and_targets_are_shifted_by_the_same_number() -> None:
    text = torch.arange(10, 18).view(1, 8)  # inputs 10..16, targets 11..17
    inputs, targets = text[:, :-1], text[:, 1:]
    assert targets_ahead(targets, 2, -100).tolist() == [[13, 14, 15, 16, 17, -100, -100]]
    # Where there is a target, it follows the token that was embedded.
    assert torch.equal(tokens_ahead(inputs, 2)[:, :5] + 1, targets_ahead(targets, 2, -100)[:, :5])


def test_the_training_loss_is_the_main_one_and_a_share_of_the_mean_of_the_others() -> None:
    parts = torch.tensor([2.0, 3.0, 5.0])
    assert float(training_loss(parts, SPEC)) == pytest.approx(2.0 + 0.3 * 4.0)
    assert float(training_loss(parts[0], SPEC)) == 2.0


def test_the_training_loss_reaches_every_parameter() -> None:
    model = initialized(SPEC).requires_grad_(True)
    parts = model(TEXT, lambda h, w: (h @ w.t()).logsumexp(-1).sum(), ahead=lambda h, w, _: (h @ w.t()).sum())
    training_loss(parts, SPEC).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

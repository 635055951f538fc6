"""The router: its choice against brute force, and its losses against the formulas, injected and counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.model.layers.moe import Router, tokens_per_expert
from phalanx.run.spec import MoeSpec

DIM = 16


def filled(moe: MoeSpec, seed: int = 0) -> Router:
    router = Router(DIM, moe)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if router.bias is not None:
            router.bias.normal_(std=0.3, generator=generator)
    return router


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


@st.composite
def routings(draw: st.DrawFn) -> MoeSpec:
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.integers(2, 4))
    groups_per_token = draw(st.integers(1, groups))
    return MoeSpec(
        experts=experts,
        per_token=draw(st.integers(1, experts // groups * groups_per_token)),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        groups_per_token=groups_per_token,
        balance_bias=draw(st.booleans()),
    )


def by_hand(router: Router, token: Tensor) -> dict[int, float]:
    """The weight of each chosen expert, in plain arithmetic."""
    moe, logits = router.moe, (router.weight.double() @ token.double()).tolist()
    values = torch.tensor(logits, dtype=torch.float64)
    scores = (values.softmax(0) if moe.score == "softmax" else 1 / (1 + (-values).exp())).tolist()
    bias = [0.0] * moe.experts if router.bias is None else router.bias.tolist()
    preference = [score + b for score, b in zip(scores, bias, strict=True)]
    size = moe.experts // moe.groups
    groups = [range(start, start + size) for start in range(0, moe.experts, size)]
    if moe.groups > 1:
        groups.sort(key=lambda group: -sum(sorted(preference[e] for e in group)[-2:]))
    open_experts = [expert for group in groups[: moe.groups_per_token] for expert in group]
    chosen = sorted(open_experts, key=lambda expert: -preference[expert])[: moe.per_token]
    total = sum(scores[expert] for expert in chosen) if moe.normalize else 1.0
    return {expert: moe.scale * scores[expert] / total for expert in chosen}


@given(routings(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_experts_and_weights_are_those_worked_out_by_hand(moe: MoeSpec, seed: int) -> None:
    router, text = filled(moe, seed), tokens(6, seed + 1)
    routing = router(text)
    for row in range(len(text)):
        got = dict(zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True))
        assert got == pytest.approx(by_hand(router, text[row]), rel=1e-4)


def test_scores_are_computed_in_fp32_for_inputs_of_any_format() -> None:
    router, text = filled(MoeSpec(experts=8)), tokens(32).bfloat16()
    routing = router(text)
    assert routing.weights.dtype == torch.float32
    assert torch.equal(routing.weights, router(text.float()).weights)


@given(st.lists(st.integers(0, 6), max_size=40))
def test_tokens_are_counted_by_expert(chosen: list[int]) -> None:
    counts = tokens_per_expert(torch.tensor(chosen, dtype=torch.int64), 7)
    assert counts.tolist() == [chosen.count(expert) for expert in range(7)]


def gradients(router: Router, text: Tensor, *, again: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of a loss that does not look at the weights: only the balance losses' are left."""
    text = text.clone().requires_grad_()
    router.zero_grad(set_to_none=True)
    weights = (
        checkpoint(lambda x: router(x).weights, text, use_reentrant=False) if again else router(text).weights
    )
    (weights * 0).sum().backward()
    assert router.weight.grad is not None
    assert text.grad is not None
    return router.weight.grad, text.grad


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_losses_are_those_of_the_papers_times_tokens_and_scale(score: str) -> None:
    moe = MoeSpec(experts=6, per_token=2, score=score, aux_loss=0.3, z_loss=0.2)  # type: ignore[arg-type]
    router, text = filled(moe), tokens(20)
    router.auxiliary_scale = 0.125
    got = gradients(router, text)
    x, weight = text.clone().requires_grad_(), router.weight.detach().clone().requires_grad_()
    logits = x @ weight.t()
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    fraction = torch.nn.functional.one_hot(router(text).experts, 6).sum(1).float().mean(0) / 2
    share = (scores / scores.sum(1, keepdim=True)).mean(0)
    loss = 0.3 * 6 * (fraction * share).sum() + 0.2 * (logits.exp().sum(1).log() ** 2).mean()
    (loss * len(text) * 0.125).backward()
    torch.testing.assert_close(got[0], weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[1], x.grad, rtol=1e-4, atol=1e-6)


def test_ranks_that_share_a_micro_batch_give_the_gradient_of_the_whole() -> None:
    moe = MoeSpec(experts=6, per_token=2, aux_loss=0.3, z_loss=0.2)
    router, text = filled(moe), tokens(20)
    router.auxiliary_scale = 1.0
    full_gradients = gradients(router, text)
    counts = tokens_per_expert(router(text).experts, 6)
    statistics = torch.cat((counts, torch.tensor([20])))
    router.total_over = lambda _: statistics
    parts = [gradients(router, part) for part in text.split([7, 13])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], full_gradients[0])
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), full_gradients[1])


def test_without_a_scale_the_losses_have_no_gradient() -> None:
    router = filled(MoeSpec(experts=4, aux_loss=1.0, z_loss=1.0))
    assert not any(gradient.any() for gradient in gradients(router, tokens(8)))


def test_the_losses_leave_the_routing_as_it_is() -> None:
    moe, text = MoeSpec(experts=4), tokens(8)
    losing = filled(replace(moe, aux_loss=1.0, z_loss=1.0))
    losing.auxiliary_scale = 1.0
    assert torch.equal(losing(text).weights, filled(moe)(text).weights)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed a second time"])
def test_tokens_are_counted_once_for_each_gradient(again: bool) -> None:
    router, text = filled(MoeSpec(experts=4)), tokens(9)
    expected = tokens_per_expert(router(text).experts, 4)
    with torch.no_grad():
        router(text)
    assert router.token_counts.tolist() == [0] * 4
    for passes in (1, 2):
        gradients(router, text, again=again)
        assert torch.equal(router.token_counts, passes * expected)
    router.counting = False
    gradients(router, text, again=again)
    assert torch.equal(router.token_counts, 2 * expected)


def test_what_is_counted_is_no_part_of_the_models_state_and_the_bias_is() -> None:
    assert set(Router(DIM, MoeSpec(balance_bias=True)).state_dict()) == {"weight", "bias"}
    assert set(Router(DIM, MoeSpec()).state_dict()) == {"weight"}


def test_the_bias_moves_by_its_speed_against_the_load() -> None:
    router = Router(DIM, MoeSpec(experts=4, balance_bias=True, bias_speed=0.5))
    router.move_bias(torch.tensor([10, 0, 6, 4]))
    assert router.bias is not None
    assert router.bias.tolist() == [-0.5, 0.5, -0.5, 0.5]
    router.move_bias(torch.tensor([5, 5, 6, 4]))
    assert router.bias.tolist() == [-0.5, 0.5, -1.0, 1.0]


def test_a_moving_bias_evens_out_a_load_that_no_gradient_touches() -> None:
    router = Router(DIM, MoeSpec(experts=4, per_token=1, normalize=False, balance_bias=True, bias_speed=0.02))
    text = tokens(400)
    with torch.no_grad():
        router.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        text[:, 0] += 3.0
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
        before = tokens_per_expert(router(text).experts, 4)
        for _ in range(200):
            router.move_bias(tokens_per_expert(router(text).experts, 4))
        after = tokens_per_expert(router(text).experts, 4)
    assert before.max() > 350
    assert after.max() < 160

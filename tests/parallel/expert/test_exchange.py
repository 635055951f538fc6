"""Tokens that travel to their experts come back as if all experts were at home, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.moe import Exchange, Experts, LocalExchange, Routing
from phalanx.parallel.expert import DividedExperts, ExpertExchange, by_expert
from phalanx.parallel.reduction.tree import SlotTree
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec
from ranks import Ranks

EXPERTS, DIM, INNER, TOKENS, PER_TOKEN = 8, 16, 32, 12, 2

RANDOM = "at random"
ROUTINGS = (
    RANDOM,
    "nothing for the first half of the experts",
    "all tokens to the same experts",
    "each rank's tokens to experts of its own",
    "only one rank's tokens to the last expert",
)


def chosen_experts(routing: str, rank: int, generator: torch.Generator) -> Tensor:
    """The experts of each token of ``rank``: ``(TOKENS, PER_TOKEN)``."""
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    if routing == RANDOM:
        return scores.topk(PER_TOKEN).indices
    if routing == ROUTINGS[1]:
        return scores[:, EXPERTS // 2 :].topk(PER_TOKEN).indices + EXPERTS // 2
    same = {ROUTINGS[2]: [5, 4], ROUTINGS[3]: [rank, rank + 4], ROUTINGS[4]: [7 if rank == 1 else 0, 3]}
    return torch.tensor([same[routing]]).expand(TOKENS, -1)


@dataclass
class Result:
    """One rank's result of a forward and a backward pass."""

    output: Tensor
    tokens: Tensor
    """Their gradient."""
    weights: Tensor
    """The gradient of the routing weights."""
    experts: dict[str, Tensor]
    """Gradients of the parameters that this rank has."""


def make_experts(gated: bool, dtype: torch.dtype) -> Experts:
    moe = MoeSpec(experts=EXPERTS, per_token=PER_TOKEN, ffn_dim=INNER)
    spec = resolve(ModelSpec(dim=DIM, vocab_size=10, ffn="swiglu" if gated else "gelu", moe=moe))
    assert spec.moe is not None
    experts, generator = Experts(spec, spec.moe), torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)
    return experts


def keep(experts: Experts, rank: int, ranks: int) -> None:
    """Leaves this rank's run of the experts."""
    for parameter in experts.parameters():
        parameter.data = parameter.data.chunk(ranks)[rank].clone()


def keep_inner(experts: Experts, rank: int, ranks: int) -> None:
    """Leaves this rank's piece of all experts' inner elements."""
    for name, parameter in experts.named_parameters():
        dim = 2 if name == "down" else 1
        parameter.data = parameter.data.chunk(ranks, dim)[rank].clone()


def pass_through(
    exchange: Exchange, experts: Experts, rank: int, routing: str, *, again: bool = False
) -> Result:
    """The tokens of ``rank`` through ``exchange`` and back."""
    generator = torch.Generator().manual_seed(rank)
    dtype = experts.up.dtype
    tokens = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(TOKENS, PER_TOKEN, generator=generator).requires_grad_()
    upstream = torch.randn(TOKENS, DIM, generator=generator).to(dtype)
    routed = Routing(chosen_experts(routing, rank, generator), weights)

    def forward(tokens: Tensor) -> Tensor:
        return exchange(tokens, routed, experts)

    output = checkpoint(forward, tokens, use_reentrant=False) if again else forward(tokens)
    output.backward(upstream)
    assert tokens.grad is not None
    assert weights.grad is not None
    gradients = {}
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
        parameter.grad = None
    return Result(output.detach(), tokens.grad, weights.grad, gradients)


def at_home(rank: int, routing: str, gated: bool, dtype: torch.dtype) -> Result:
    return pass_through(LocalExchange(), make_experts(gated, dtype), rank, routing)


def dealt(slots: int, gated: bool, dtype: torch.dtype, again: bool) -> dict[str, Result]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    experts = make_experts(gated, dtype)
    keep(experts, rank, ranks)
    exchange = ExpertExchange(dist.group.WORLD, slots, CommClock(blocking=True))
    results = {name: pass_through(exchange, experts, rank, name, again=again) for name in ROUTINGS}
    assert exchange.clock.take_ns() > 0
    return results


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def added(gradients: list[Tensor]) -> Tensor:
    """In the order of the slots' tree, in fp32."""
    tree: SlotTree[Tensor] = SlotTree(len(gradients), lambda left, right: left + right)
    for slot, gradient in enumerate(gradients):
        tree.push(slot, gradient.float())
    return tree.take_root().to(gradients[0].dtype)


@pytest.mark.parametrize(
    ("ranks_", "gated", "dtype"),
    [
        (2, True, torch.float32),
        (4, True, torch.float32),
        (4, False, torch.float32),
        (4, True, torch.bfloat16),
    ],
    ids=str,
)
def test_a_slot_has_the_bits_that_it_has_alone_and_slots_are_added_in_their_tree(
    ranks: Ranks, ranks_: int, gated: bool, dtype: torch.dtype
) -> None:
    results = ranks.run(ranks_, dealt, ranks_, gated, dtype, False)
    for routing in ROUTINGS:
        alone = [at_home(rank, routing, gated, dtype) for rank in range(ranks_)]
        ours = [result[routing] for result in results]
        for mine, expected in zip(ours, alone, strict=True):
            assert same_bits(mine.output, expected.output), routing
            assert same_bits(mine.tokens, expected.tokens), routing
            assert same_bits(mine.weights, expected.weights), routing
        for name in alone[0].experts:
            expected = added([result.experts[name] for result in alone])
            assert same_bits(torch.cat([result.experts[name] for result in ours]), expected), (routing, name)


@pytest.mark.parametrize("slots", [1, 2])
def test_tokens_of_a_slot_that_come_from_several_ranks_are_computed_together(
    ranks: Ranks, slots: int
) -> None:
    results = ranks.run(4, dealt, slots, True, torch.float32, False)
    for routing in ROUTINGS:
        alone = [at_home(rank, routing, True, torch.float32) for rank in range(4)]
        ours = [result[routing] for result in results]
        for mine, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine.output, expected.output, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(mine.tokens, expected.tokens, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(mine.weights, expected.weights, rtol=2e-6, atol=2e-6)
        for name in alone[0].experts:
            expected = added([result.experts[name] for result in alone])
            gradient = torch.cat([result.experts[name] for result in ours])
            assert (gradient - expected).abs().max() <= 2e-6 * expected.abs().max(), (routing, name)


def test_recomputing_activations_changes_no_bit(ranks: Ranks) -> None:
    plain = ranks.run(2, dealt, 2, True, torch.float32, False)
    again = ranks.run(2, dealt, 2, True, torch.float32, True)
    for kept, recomputed in zip(plain, again, strict=True):
        for routing in ROUTINGS:
            assert same_bits(kept[routing].output, recomputed[routing].output)
            assert same_bits(kept[routing].tokens, recomputed[routing].tokens)
            for name, gradient in kept[routing].experts.items():
                assert same_bits(gradient, recomputed[routing].experts[name])


def divided() -> dict[str, Result]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    experts = make_experts(True, torch.float32)
    keep_inner(experts, rank, ranks)
    exchange = DividedExperts(SequenceComm(dist.group.WORLD, CommClock(blocking=True)), LocalExchange())
    return {name: pass_through(exchange, experts, rank, name) for name in ROUTINGS}


def test_experts_divided_by_inner_elements_give_the_same_and_count_no_gradient_twice(ranks: Ranks) -> None:
    results = ranks.run(4, divided)
    for routing in ROUTINGS:
        alone = [at_home(rank, routing, True, torch.float32) for rank in range(4)]
        ours = [result[routing] for result in results]
        for mine, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine.output, expected.output, rtol=2e-6, atol=4e-6)
            torch.testing.assert_close(mine.tokens, expected.tokens, rtol=2e-6, atol=4e-6)
            torch.testing.assert_close(mine.weights, expected.weights, rtol=2e-6, atol=4e-6)
        for name in alone[0].experts:
            expected = added([result.experts[name] for result in alone])
            gradient = torch.cat([result.experts[name] for result in ours], 2 if name == "down" else 1)
            assert (gradient - expected).abs().max() <= 2e-6 * expected.abs().max(), (routing, name)


@given(
    st.integers(1, 4).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 5), min_size=experts, max_size=experts), min_size=1, max_size=4
        )
    )
)
def test_rows_are_put_in_the_order_of_expert_then_source_then_row(table: list[list[int]]) -> None:
    rows = [
        (expert, source, row)
        for source, counts in enumerate(table)
        for expert, count in enumerate(counts)
        for row in range(count)
    ]
    taken, places = by_expert(torch.tensor(table), len(rows))
    assert [rows[index] for index in taken] == sorted(rows)
    assert [sorted(rows)[index] for index in places] == rows

"""A mixture of experts against every expert computed for every token, and how it moves rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.layers.expert_groups import Groups
from phalanx.model.layers.moe import MoE, combine, copies_by_expert, order_by_expert, permute
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec

MOE = MoeSpec(experts=6, per_token=3, ffn_dim=24)
SPEC = ModelSpec(dim=16, moe=MOE)
SPECS = {
    "swiglu": SPEC,
    "gelu": replace(SPEC, ffn="gelu"),
    "shared": replace(SPEC, moe=replace(MOE, shared=2)),
    "one expert": replace(SPEC, moe=replace(MOE, per_token=1, normalize=False)),
    "all biases, clamped": replace(
        SPEC, ffn="swiglu-clamped", swiglu_limit=0.4, ffn_bias=True, moe=replace(MOE, router_bias=True)
    ),
    "gelu, biases": replace(SPEC, ffn="gelu", ffn_bias=True),
    "sigmoid": replace(SPEC, moe=replace(MOE, score="sigmoid", scale=2.0)),
}


def filled(spec: ModelSpec) -> MoE:
    spec = resolve(spec)
    assert spec.moe is not None
    layer = MoE(spec, spec.moe)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return layer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def densely(layer: MoE, x: Tensor) -> Tensor:
    """Every expert for every token, those not chosen with weight zero."""
    rows = x.flatten(0, 1)
    routing, experts = layer.router(rows), layer.experts
    weights = torch.zeros(len(rows), len(experts.up)).scatter(1, routing.experts, routing.weights)
    results = []

    def through(name: str, inputs: Tensor, number: int) -> Tensor:
        bias = getattr(experts, f"{name}_bias")
        return F.linear(inputs, getattr(experts, name)[number], None if bias is None else bias[number])

    for number in range(len(experts.up)):
        inner = through("up", rows, number)
        if experts.gate is None:
            inner = F.gelu(inner)
        elif layer.experts.spec.ffn == "swiglu":
            inner = F.silu(through("gate", rows, number)) * inner
        else:
            gate = through("gate", rows, number).minimum(torch.tensor(0.4))
            inner = (inner.maximum(torch.tensor(-0.4)).minimum(torch.tensor(0.4)) + 1) * gate
            inner = inner * torch.sigmoid(1.702 * gate)
        results.append(through("down", inner, number))
    mixed = torch.einsum("ned,ne->nd", torch.stack(results, dim=1), weights).view_as(x)
    return mixed if layer.shared is None else mixed + layer.shared(x)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_values_and_gradients_are_those_of_computing_every_expert(spec: ModelSpec) -> None:
    layer, upstream = filled(spec), random(2, 9, 16, seed=1)
    results = []
    for apply in (layer, lambda x: densely(layer, x)):
        layer.zero_grad(set_to_none=True)
        x = random(2, 9, 16).requires_grad_()
        y = apply(x)
        y.backward(upstream)
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_gets_a_gradient_of_zero() -> None:
    layer = filled(SPEC)
    with torch.no_grad():
        layer.router.weight[5] = 0
        layer.router.weight[5, 0] = -1000.0
    x = random(1, 4, 16)
    x[..., 0] = 1.0
    layer(x).sum().backward()
    assert layer.experts.up.grad is not None
    assert not layer.experts.up.grad[5].any()
    assert layer.experts.up.grad[:5].any()


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    layer, x = filled(SPEC), random(2, 9, 16)
    torch.testing.assert_close(layer(x[1:]), layer(x)[1:])


def test_all_tokens_can_go_to_one_expert() -> None:
    layer, x = filled(SPECS["one expert"]), random(1, 7, 16).abs()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[4] = 1.0
    assert (layer.router(x[0]).experts == 4).all()
    torch.testing.assert_close(layer(x), densely(layer, x))


chosen = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 4), min_size=k, max_size=k), min_size=1, max_size=12)
)


@given(chosen)
def test_copies_are_sorted_by_expert_and_among_equals_by_token(experts: list[list[int]]) -> None:
    order = order_by_expert(torch.tensor(experts), 5)
    flat = [expert for row in experts for expert in row]
    assert order.copies.tolist() == sorted(range(len(flat)), key=lambda copy: (flat[copy], copy))
    assert order.places[order.copies].tolist() == list(range(len(flat)))
    assert order.counts.tolist() == [flat.count(expert) for expert in range(5)]


@given(chosen)
def test_moving_rows_has_the_gradients_of_indexing(experts: list[list[int]]) -> None:
    order = order_by_expert(torch.tensor(experts), 5)
    n, k = len(experts), len(experts[0])
    results = []
    for moved in (False, True):
        tokens, weights = random(n, 3).requires_grad_(), random(n, k, seed=1).requires_grad_()
        if moved:
            rows = copies_by_expert(tokens, order)
            combined = combine(permute(rows * 2, order.copies, order.places), order, weights)
        else:
            rows = tokens.repeat_interleave(k, 0)[order.copies]
            combined = ((rows * 2)[order.copies][order.places].view(n, k, 3) * weights[..., None]).sum(1)
        combined.backward(random(n, 3, seed=2))
        results.append([combined.detach(), tokens.grad, weights.grad])
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference)


def test_a_product_and_an_exchange_can_be_replaced() -> None:
    layer, x = filled(SPEC), random(1, 5, 16)
    expected = layer(x)

    def one_by_one(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        parts = rows.tensor_split(groups.ends[:-1].long())
        return torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])

    layer.experts.product = one_by_one
    torch.testing.assert_close(layer(x), expected)
    layer.exchange = lambda tokens, routing, experts: torch.zeros_like(tokens)  # noqa: ARG005
    assert not layer(x).any()


def test_results_are_added_in_fp32_and_come_back_in_the_format_of_the_rows() -> None:
    order = order_by_expert(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    result = combine(rows, order, torch.ones(1, 3))
    assert result.dtype == torch.bfloat16
    assert result.item() == 258  # in bf16, 256 + 1 is 256

"""AdamW: the published update, whose result for an element depends on that element alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.run.kinds.operations import Parameter, ParameterKind
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.adamw import AdamW
from phalanx.train.optimizers.optimizer import decays


def stepped(
    weights: torch.Tensor, gradients: list[torch.Tensor], spec: OptimizerSpec, kind: ParameterKind
) -> torch.Tensor:
    """``weights`` after one update for each of ``gradients``."""
    parameter = nn.Parameter(weights.clone())
    optimizer = AdamW(spec, {"w": parameter}, {"w": Parameter("w", tuple(weights.shape), kind)})
    for number, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        optimizer.step(number, spec.lr, 1.0)
    return parameter.detach()


def random_case(size: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(size, generator=generator)
    return weights, [torch.randn(size, generator=generator) * 10.0**-k for k in range(5)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_agrees_with_pytorchs_adamw(decay: float) -> None:
    weights, gradients = random_case(70_001)
    spec = OptimizerSpec(lr=1e-2, weight_decay=decay, beta1=0.8, beta2=0.9)
    theirs = nn.Parameter(weights.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.9), eps=spec.eps, weight_decay=decay)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(
        stepped(weights, gradients, spec, "matrix"), theirs.detach(), rtol=2e-6, atol=1e-7
    )


@given(st.lists(st.integers(0, 400), max_size=5), st.integers(0, 3))
def test_an_element_gets_the_same_bits_in_any_shard(cuts: list[int], seed: int) -> None:
    weights, gradients = random_case(401, seed)
    full_result = stepped(weights, gradients, OptimizerSpec(), "matrix")
    bounds = sorted({0, 401, *cuts})
    parts = [
        stepped(weights[a:b], [gradient[a:b] for gradient in gradients], OptimizerSpec(), "matrix")
        for a, b in itertools.pairwise(bounds)
    ]
    assert torch.equal(torch.cat(parts), full_result)


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("matrix", OptimizerSpec(), True),
        ("output", OptimizerSpec(), True),
        ("norm", OptimizerSpec(), False),
        ("bias", OptimizerSpec(), False),
        ("embedding", OptimizerSpec(), False),
        ("norm", OptimizerSpec(decay_norms=True), True),
        ("embedding", OptimizerSpec(decay_embeddings=True), True),
    ],
)
def test_norms_biases_and_embeddings_are_not_decayed_by_default(
    kind: ParameterKind, spec: OptimizerSpec, expected: bool
) -> None:
    assert decays(Parameter("w", (2, 2), kind), spec) == expected


def test_the_gradient_scale_is_applied_before_anything_else() -> None:
    weights, gradients = random_case(100)
    parameter, other = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    kinds = {"w": Parameter("w", (100,), "matrix")}
    for leaf, gradient, scale in [(parameter, gradients[0] * 0.25, 1.0), (other, gradients[0], 0.25)]:
        optimizer = AdamW(OptimizerSpec(), {"w": leaf}, kinds)
        leaf.grad = gradient
        optimizer.step(1, 1e-3, scale)
    assert torch.equal(parameter, other)


def test_a_parameter_without_a_gradient_is_named() -> None:
    optimizer = AdamW(
        OptimizerSpec(), {"w": nn.Parameter(torch.zeros(2))}, {"w": Parameter("w", (2,), "matrix")}
    )
    with pytest.raises(RuntimeError, match="w has no gradient"):
        optimizer.step(1, 1e-3, 1.0)


def test_the_moments_begin_at_zero_and_are_laid_out_as_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamW(OptimizerSpec(), {"w": parameter}, {"w": Parameter("w", (3, 2), "matrix")})
    assert optimizer.exp_avg["w"].shape == parameter.shape
    assert not copy.copy(optimizer.exp_avg_sq["w"]).any()

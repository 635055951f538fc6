"""Muon, Adafactor, Shampoo and SOAP on one matrix: the published updates, against independent references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.model.facts.optimizer_state import matrix_state
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.matrix_optimizer import MatrixRule
from phalanx.train.optimizers.matrix_rules import (
    Adafactor,
    MatrixBlocks,
    Muon,
    Shampoo,
    Soap,
    inverse_fourth_root,
    orthogonal,
)

Array = NDArray[np.float64]
SHAPES = [(12, 7), (7, 12), (8, 8), (1, 5)]


def random_gradients(shape: tuple[int, int], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    return [torch.randn(shape, generator=generator) * 10.0**-k for k in range(steps)]


def name_of(rule: type[MatrixRule]) -> Any:
    """The name of an optimizer in a run file."""
    return rule.__name__.lower()


def changes(rule: MatrixRule, gradients: list[Tensor]) -> list[Tensor]:
    """The changes that ``rule`` makes of one gradient after another."""
    rows, columns = gradients[0].shape
    state = {kept.name: torch.zeros(kept.shape) for kept in matrix_state(rule.spec, rows, columns)}
    return [rule.change(g.clone(), state, number).clone() for number, g in enumerate(gradients, 1)]


def pytorchs_weights(optimizer: type, gradients: list[Tensor], **options: object) -> list[Tensor]:
    """The weights after each step of one of PyTorch's optimizers, from zero."""
    weights = nn.Parameter(torch.zeros_like(gradients[0]))
    reference = optimizer([weights], **options)
    history = []
    for gradient in gradients:
        weights.grad = gradient.clone()
        reference.step()
        history.append(weights.detach().clone())
    return history


# --- Muon ---


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_agrees_with_its_formula_in_double_precision(shape: tuple[int, int]) -> None:
    gradients = random_gradients(shape)
    momentum = np.zeros(shape)
    for gradient, change in zip(
        gradients, changes(Muon(OptimizerSpec(name="muon", beta1=0.9)), gradients), strict=True
    ):
        g = gradient.double().numpy()
        momentum = 0.9 * momentum + 0.1 * g
        x = 0.1 * g + 0.9 * momentum
        x = x / np.linalg.norm(x)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
        expected = 0.2 * math.sqrt(max(shape)) * x
        np.testing.assert_allclose(change.numpy(), expected, rtol=1e-3, atol=2e-5)


def test_muon_agrees_with_pytorchs_as_far_as_that_one_computes_in_bf16() -> None:
    gradients = random_gradients((48, 32))
    theirs = pytorchs_weights(
        torch.optim.Muon, gradients, lr=1.0, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    ours = -torch.stack(changes(Muon(OptimizerSpec(name="muon", beta1=0.9)), gradients)).cumsum(0)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < 0.03 * other.norm()


@given(st.integers(1, 24), st.integers(1, 24), st.floats(1e-6, 1e6))
def test_newton_schulz_brings_singular_values_near_one_at_any_scale(
    rows: int, columns: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator))
    rank = min(rows, columns)
    values = torch.linspace(0.05, 1.0, rank)
    matrix = left[:, :rank] @ torch.diag(values) @ right[:, :rank].T * scale
    singular_values = torch.linalg.svdvals(orthogonal(matrix, 5))
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.3


def test_muons_changes_are_as_large_as_adamws_usually_are() -> None:
    rms = changes(Muon(OptimizerSpec(name="muon")), random_gradients((96, 64)))[-1].square().mean().sqrt()
    assert 0.12 < rms < 0.25


def test_muon_makes_nothing_of_a_gradient_that_is_zero() -> None:
    assert not changes(Muon(OptimizerSpec(name="muon")), [torch.zeros(4, 3)])[0].any()


# --- Adafactor ---


@pytest.mark.parametrize("shape", SHAPES)
def test_adafactor_agrees_with_pytorchs(shape: tuple[int, int]) -> None:
    gradients = random_gradients(shape)
    # With eps2 = 1 and small weights PyTorch's learning rate is not multiplied by the size of the weights.
    theirs = pytorchs_weights(
        torch.optim.Adafactor, gradients, lr=0.125, eps=(1e-15, 1.0), d=1.0, weight_decay=0.0
    )
    spec = OptimizerSpec(name="adafactor", beta1=0.0, beta2=0.9999)
    ours = -0.125 * torch.stack(changes(Adafactor(spec), gradients)).cumsum(0)
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=2e-5, atol=1e-6)


def test_adafactors_momentum_is_the_running_mean_of_its_changes() -> None:
    gradients = random_gradients((6, 5))
    plain = changes(Adafactor(OptimizerSpec(name="adafactor", beta1=0.0)), gradients)
    mean = torch.zeros(6, 5)
    for change, smoothed in zip(
        plain, changes(Adafactor(OptimizerSpec(name="adafactor", beta1=0.8)), gradients), strict=True
    ):
        mean = 0.8 * mean + 0.2 * change
        torch.testing.assert_close(smoothed, mean)


def test_adafactor_without_momentum_keeps_only_the_edges_of_a_matrix() -> None:
    kept = matrix_state(OptimizerSpec(name="adafactor", beta1=0.0), 300, 200)
    assert sum(math.prod(tensor.shape) for tensor in kept) == 500


# --- Shampoo and SOAP ---


def fourth_root(statistics: Array) -> Array:
    values, vectors = np.linalg.eigh(statistics)
    return (vectors * (np.maximum(values, 0) + 1e-6 * values.max()) ** -0.25) @ vectors.T


def plain_shampoo(gradients: list[Tensor], spec: OptimizerSpec) -> list[Array]:
    """Shampoo with grafting to Adam on one block, as the papers write it, in double precision."""
    rows, columns = gradients[0].shape
    mean, square = np.zeros((rows, columns)), np.zeros((rows, columns))
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    steps = []
    for number, gradient in enumerate(gradients, 1):
        g = gradient.double().numpy()
        mean = spec.beta1 * mean + (1 - spec.beta1) * g
        square = spec.beta2 * square + (1 - spec.beta2) * g * g
        left = spec.beta2 * left + (1 - spec.beta2) * g @ g.T
        right = spec.beta2 * right + (1 - spec.beta2) * g.T @ g
        if number % spec.precondition_every == 1 or spec.precondition_every == 1:
            left_root, right_root = fourth_root(left), fourth_root(right)
        adam = mean / (1 - spec.beta1**number) / (np.sqrt(square / (1 - spec.beta2**number)) + spec.eps)
        step = left_root @ mean @ right_root
        steps.append(step * np.linalg.norm(adam) / np.linalg.norm(step))
    return steps


def plain_soap(gradients: list[Tensor], spec: OptimizerSpec) -> list[Array]:
    """SOAP on one block as algorithms 3 and 4 of the paper write it, in double precision; the first step only looks."""
    rows, columns = gradients[0].shape
    mean, square = np.zeros((rows, columns)), np.zeros((rows, columns))
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    from_left, from_right = np.eye(rows), np.eye(columns)
    steps = [np.zeros((rows, columns))]
    for number, gradient in enumerate(gradients):
        g = gradient.double().numpy()
        if number:
            mean = spec.beta1 * mean + (1 - spec.beta1) * g
            square = spec.beta2 * square + (1 - spec.beta2) * (from_left.T @ g @ from_right) ** 2
            root = np.sqrt(square / (1 - spec.beta2**number)) + spec.eps
            turned = from_left.T @ mean @ from_right / (1 - spec.beta1**number) / root
            steps.append(from_left @ turned @ from_right.T)
        left = spec.beta2 * left + (1 - spec.beta2) * g @ g.T
        right = spec.beta2 * right + (1 - spec.beta2) * g.T @ g
        if number == 0:
            from_left, from_right = (np.linalg.eigh(s)[1][:, ::-1] for s in (left, right))
        elif (number + 1) % spec.precondition_every == 0:
            from_left, from_right = np.linalg.qr(left @ from_left)[0], np.linalg.qr(right @ from_right)[0]
    return steps


REFERENCES = [(Shampoo, plain_shampoo), (Soap, plain_soap)]


def well_conditioned_gradients(shape: tuple[int, int], steps: int = 7) -> list[Tensor]:
    """Gradients of full rank whose singular values are far apart, so that single precision finds the same basis."""
    generator = torch.Generator().manual_seed(7)
    size = min(shape)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator))[0][:, :size] for n in shape)
    values = 2.0 ** -torch.arange(size)
    noise = [0.01 * torch.randn(shape, generator=generator) for _ in range(steps)]
    return [left @ torch.diag(values * (1 + 0.1 * k)) @ right.T + noise[k] for k in range(steps)]


@pytest.mark.parametrize(("rule", "reference"), REFERENCES)
def test_one_block_agrees_with_the_papers_formulas_in_double_precision(rule: type, reference: object) -> None:
    spec = OptimizerSpec(name=name_of(rule), beta1=0.8, beta2=0.9, precondition_every=3)
    gradients = well_conditioned_gradients((5, 5))
    for change, expected in zip(changes(rule(spec), gradients), reference(gradients, spec), strict=True):  # type: ignore[operator]
        np.testing.assert_allclose(change.numpy(), expected, rtol=5e-3, atol=5e-4 * np.abs(expected).max())


@pytest.mark.parametrize("rule", [Shampoo, Soap])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (7, 7)])
def test_a_matrix_in_blocks_is_treated_as_its_blocks_would_be(rule: type, shape: tuple[int, int]) -> None:
    spec = OptimizerSpec(name=name_of(rule), block_size=4, precondition_every=2)
    gradients = random_gradients(shape)
    full_changes = changes(rule(spec), gradients)
    for block in MatrixBlocks(*shape, 4):
        alone = changes(rule(spec), [g[block.rows, block.columns].contiguous() for g in gradients])
        for full_change, part in zip(full_changes, alone, strict=True):
            assert torch.equal(full_change[block.rows, block.columns], part)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_blocks_cover_a_matrix_once_and_none_is_larger_than_allowed(
    rows: int, columns: int, size: int
) -> None:
    covered = torch.zeros(rows, columns)
    blocks = MatrixBlocks(rows, columns, size)
    for block in blocks:
        covered[block.rows, block.columns] += 1
        assert max(block.left(torch.zeros(blocks.left_shape)).shape) <= size
        assert max(block.right(torch.zeros(blocks.right_shape)).shape) <= size
    assert torch.equal(covered, torch.ones(rows, columns))


def test_the_inverse_fourth_root_undoes_the_matrix_when_taken_four_times() -> None:
    factor = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    statistics = factor @ factor.T + torch.eye(6)
    root = inverse_fourth_root(statistics)
    torch.testing.assert_close(
        (root @ root @ root @ root @ statistics.double()).float(), torch.eye(6), rtol=0, atol=2e-4
    )


def test_shampoo_has_the_length_of_adams_step() -> None:
    spec = OptimizerSpec(name="shampoo")
    gradient = random_gradients((6, 4))[0]
    # At the first step every element of Adam's is one.
    assert changes(Shampoo(spec), [gradient])[0].norm().item() == pytest.approx(math.sqrt(24), rel=1e-5)


@pytest.mark.parametrize("rule", [Shampoo, Soap, Adafactor])
def test_a_gradient_of_zero_changes_nothing(rule: type) -> None:
    assert not changes(rule(OptimizerSpec(name=name_of(rule))), [torch.zeros(4, 3)])[0].any()

"""Muon: momentum made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Nesterov momentum is replaced by the nearest matrix with all singular values near one: a step in all directions of the
matrix, not just in the few that dominate its gradient. A Newton-Schulz iteration finds it with matrix products alone. Its
change is scaled by ``0.2 sqrt(max(rows, columns))`` so that its elements are as large as AdamW's usually are, and AdamW's
learning rate and decay carry over (Moonlight, arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.train.optimizers.matrix.matrix_optimizer import MatrixRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic: steepest at zero among those that keep singular values within about [0.7, 1.2]."""
_SMALLEST_NORM = 1e-7


class Muon(MatrixRule):
    """Keeps the gradient's running mean, ``momentum``."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:  # noqa: ARG002
        momentum = state["momentum"]  # (rows, columns)
        momentum.lerp_(gradient, 1 - self.spec.beta1)
        direction = orthogonal(gradient.lerp_(momentum, self.spec.beta1), self.spec.newton_schulz_steps)
        return direction.mul_(0.2 * math.sqrt(max(gradient.shape)))


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """About ``U V^T`` where ``matrix = U S V^T``: fp32; computed in bf16 on a GPU, whose error is below the method's."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=_SMALLEST_NORM)
    x = x.to(torch.bfloat16) if x.is_cuda else x
    tall = x.shape[0] > x.shape[1]
    x = x.T.contiguous() if tall else x  # (short, long): the products below are with the shorter side
    for _ in range(steps):
        # One step of the quintic iteration: X <- a X + (b A + c A^2) X with A = X X^T, (short, short).
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    nearest: Tensor = x.T if tall else x
    return nearest.float().contiguous()

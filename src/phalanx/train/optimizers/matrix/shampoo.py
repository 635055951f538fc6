"""Shampoo (Gupta et al., arXiv 1802.09568): the gradient between roots of the covariances of its rows and columns.

With ``L`` the running mean of ``G G^T`` and ``R`` that of ``G^T G``, the step is ``L^-1/4 M R^-1/4`` for the gradient's
running mean ``M``: Adagrad with a full matrix, were that the product of the two. The roots are taken anew every
``precondition_every`` steps from eigenvalues in fp64. Each block's step is then given the length that Adam's would have,
called grafting, so that AdamW's learning rate carries over (Distributed Shampoo, Shi et al., arXiv 2309.06497).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.train.optimizers.matrix.matrix_optimizer import MatrixRule
from phalanx.train.optimizers.matrix.preconditioner import MatrixBlock, MatrixBlocks, aligned

_RIDGE = 1e-6
"""Added to all eigenvalues, as a part of the largest (Anil et al., arXiv 2002.09018)."""
_SMALLEST_NORM = 1e-30


class Shampoo(MatrixRule):
    """Keeps both of Adam's moments, the statistics ``left`` and ``right``, and their roots."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        spec = self.spec
        # Adam's step: its first moment M is preconditioned, its length is what each block is grafted to.
        mean = state["exp_avg"].lerp_(gradient, 1 - spec.beta1)
        squares = state["exp_avg_sq"].lerp_(gradient.square(), 1 - spec.beta2)
        adam = mean / (squares.sqrt() / math.sqrt(1 - spec.beta2**number) + spec.eps)
        adam.div_(1 - spec.beta1**number)
        for block in MatrixBlocks(gradient.shape[0], gradient.shape[1], spec.block_size):
            # L <- b L + (1 - b) G G^T, R <- b R + (1 - b) G^T G
            self._update_statistics(block, block.of(gradient), state)
            if (number - 1) % spec.precondition_every == 0:
                block.left(state["left_root"]).copy_(inverse_fourth_root(block.left(state["left"])))
                block.right(state["right_root"]).copy_(inverse_fourth_root(block.right(state["right"])))
            left, right = block.left(state["left_root"]), block.right(state["right_root"])
            # L^-1/4 M R^-1/4, then grafting: the direction is Shampoo's, the length Adam's.
            step = aligned(left) @ block.of(mean) @ aligned(right)
            length = block.of(adam).norm() / step.norm().clamp(min=_SMALLEST_NORM)
            adam[block.rows, block.columns] = step.mul_(length)
        return adam

    def _update_statistics(self, block: MatrixBlock, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        block.left(state["left"]).lerp_(gradient @ gradient.T, 1 - self.spec.beta2)
        block.right(state["right"]).lerp_(gradient.T @ gradient, 1 - self.spec.beta2)


def inverse_fourth_root(statistics: Tensor) -> Tensor:
    """``(S + ridge)^-1/4`` of a symmetric matrix without negative eigenvalues, fp32; of zero, the unit matrix."""
    values, vectors = torch.linalg.eigh(statistics.double())
    values = values.clamp_(min=0.0)
    largest = values[-1]
    values = torch.where(largest > 0, values + _RIDGE * largest, 1.0)
    root: Tensor = (vectors * values.pow(-0.25)) @ vectors.T
    return root

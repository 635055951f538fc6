"""SOAP (Vyas et al., arXiv 2409.11321): Adam in the eigenbasis of Shampoo's statistics.

The covariances of a gradient's rows and columns say in which directions it mostly moves. In the basis of their eigenvectors
the second moment of single elements tells more than in the original one, so Adam is run there: the first moment is
turned into the basis, divided by the root of a second moment that is kept in the basis, and turned back. The basis follows the
statistics by one step of orthogonal iteration and a QR decomposition every ``precondition_every`` steps (algorithm 4).

In the eigenbasis of its own statistics the first gradient is diagonal, and Adam would make full steps of the rounding errors
beside the diagonal. So, as in the authors' implementation, a gradient enters the basis only after it has been used, and
the first one does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.train.optimizers.matrix.matrix_optimizer import MatrixRule
from phalanx.train.optimizers.matrix.preconditioner import MatrixBlocks, aligned


class Soap(MatrixRule):
    """Keeps Adam's moments (the second one in the basis), the statistics ``left`` and ``right``, and their bases."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        spec, change = self.spec, torch.zeros_like(gradient)
        if number > 1:
            state["exp_avg"].lerp_(gradient, 1 - spec.beta1)
        for block in MatrixBlocks(gradient.shape[0], gradient.shape[1], spec.block_size):
            part = block.of(gradient)  # (rows of the block, columns of the block)
            left, right = block.left(state["left_basis"]), block.right(state["right_basis"])
            if number > 1:
                # Turn gradient and mean into the basis of the step before, apply Adam there, turn the step back.
                mean = block.of(state["exp_avg"])
                squares = state["basis_exp_avg_sq"][block.rows, block.columns]
                step = self._adam(part, mean, squares, aligned(left), aligned(right), number - 1)
                change[block.rows, block.columns] = step
            # Only now does this gradient enter the statistics, and when it is time the basis (algorithm 4).
            self._follow(block.left(state["left"]), left, part @ part.T, number)
            self._follow(block.right(state["right"]), right, part.T @ part, number)
        return change

    def _adam(
        self, gradient: Tensor, mean: Tensor, squares: Tensor, left: Tensor, right: Tensor, number: int
    ) -> Tensor:
        """Adam's step ``number`` in the bases ``left`` and ``right``; updates the second moment there, ``squares``."""
        spec = self.spec
        squares.lerp_((left.T @ gradient @ right).square(), 1 - spec.beta2)
        root = squares.sqrt().div_(math.sqrt(1 - spec.beta2**number)).add_(spec.eps)
        turned = (left.T @ mean @ right).div_(1 - spec.beta1**number)
        step: Tensor = left @ turned.div_(root) @ right.T
        return step

    def _follow(self, statistics: Tensor, basis: Tensor, square: Tensor, number: int) -> None:
        """Takes the gradient's ``square`` into the statistics, and when it is time, the basis along."""
        statistics.lerp_(square, 1 - self.spec.beta2)
        if number == 1:
            basis.copy_(torch.linalg.eigh(statistics.double()).eigenvectors.flip(-1))
        elif number % self.spec.precondition_every == 0:
            basis.copy_(torch.linalg.qr(aligned(statistics) @ aligned(basis)).Q)

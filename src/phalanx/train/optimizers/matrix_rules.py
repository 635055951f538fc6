"""Optimizer rules that take whole matrices: Shampoo, SOAP, Adafactor and Muon.

Shampoo and SOAP keep statistics of rows and columns by block. The covariance of a matrix's rows is a matrix of as many rows, and its decomposition costs their cube. Matrices larger than
``block_size`` are therefore divided into blocks, as even as can be, each with statistics of its own. Statistics of all blocks
are kept in one tensor ``(block rows, block columns, n, n)``; where blocks differ by a row, the smaller ones fill it in part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.hardware.portable.correctly_rounded import power
from phalanx.model.facts.optimizer_state import BlockGrid
from phalanx.parallel.mesh import piece
from phalanx.train.optimizers.matrix_optimizer import MatrixRule


@dataclass(frozen=True)
class MatrixBlock:
    """One block of a matrix."""

    place: tuple[int, int]
    rows: slice
    columns: slice

    def left(self, statistics: Tensor) -> Tensor:
        """This block's part of all blocks' row statistics ``(block rows, block columns, n, n)``: ``(rows, rows)``, a view."""
        height = self.rows.stop - self.rows.start
        return statistics[self.place][:height, :height]

    def right(self, statistics: Tensor) -> Tensor:
        """This block's part of all blocks' column statistics: ``(columns, columns)``, a view."""
        width = self.columns.stop - self.columns.start
        return statistics[self.place][:width, :width]

    def of(self, matrix: Tensor) -> Tensor:
        """This block of ``matrix``, in fresh memory: kernels may round as their operands are aligned."""
        return matrix[self.rows, self.columns].clone()


class MatrixBlocks(BlockGrid):
    """The blocks of a matrix of ``rows x columns``, row by row."""

    def __iter__(self) -> Iterator[MatrixBlock]:
        """Yield the blocks row by row, with the rows and columns of each."""
        down, across = self.counts
        for i in range(down):
            for j in range(across):
                rows, columns = piece(self.rows, i, down), piece(self.columns, j, across)
                yield MatrixBlock((i, j), slice(rows.start, rows.stop), slice(columns.start, columns.stop))


def aligned(view: Tensor) -> Tensor:
    """``view`` in fresh memory of its own: kernels may round as their operands are aligned."""
    return view.contiguous() if not view.is_contiguous() else view.clone()


# Shampoo (Gupta et al., arXiv 1802.09568): the gradient between roots of the covariances of its rows and columns.
#
# With ``L`` the running mean of ``G G^T`` and ``R`` that of ``G^T G``, the step is ``L^-1/4 M R^-1/4`` for the gradient's
# running mean ``M``. It approximates Adagrad with a full matrix by a Kronecker product of ``L`` and ``R``. The roots are
# computed again every ``precondition_every`` steps, from eigenvalues in fp64. Each block's step then gets the length of Adam's
# step (grafting), so that AdamW's learning rate applies (Distributed Shampoo, Shi et al., arXiv 2309.06497).


_RIDGE = 1e-6
"""Added to all eigenvalues, as a part of the largest (Anil et al., arXiv 2002.09018)."""
_SMALLEST_NORM = 1e-30


class Shampoo(MatrixRule):
    """State: both of Adam's moments, the statistics ``left`` and ``right``, and their roots."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """Return the change of a matrix at step ``number``, from 1: preconditioned by blocks, each as long as Adam's. Updates
        ``state`` in place.

        The inverse roots are computed every ``precondition_every`` steps.
        """
        spec = self.spec
        # Adam's step: its first moment M is preconditioned, and each block gets its length.
        mean = state["exp_avg"].lerp_(gradient, 1 - spec.beta1)
        squares = state["exp_avg_sq"].lerp_(gradient.square(), 1 - spec.beta2)
        adam = mean / (squares.sqrt() / math.sqrt(1 - power(spec.beta2, number)) + spec.eps)
        adam.div_(1 - power(spec.beta1, number))
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
    """Return ``(S + ridge)^-1/4``, fp64, of a symmetric matrix without negative eigenvalues; of zero, the unit matrix.

    The ridge is relative to the largest eigenvalue.
    """
    values, vectors = torch.linalg.eigh(statistics.double())
    values = values.clamp_(min=0.0)
    largest = values[-1]
    values = torch.where(largest > 0, values + _RIDGE * largest, 1.0)
    root: Tensor = (vectors * values.pow(-0.25)) @ vectors.T
    return root


# SOAP (Vyas et al., arXiv 2409.11321): Adam in the eigenbasis of Shampoo's statistics.
#
# The eigenvectors of the covariances of a gradient's rows and columns are the directions in which it mostly moves. In their
# basis, the second moment of single elements is more informative than in the original one, so Adam runs there. The first moment
# is rotated into the basis, divided by the root of a second moment that is stored in the basis, and rotated back. The basis
# follows the statistics by one step of orthogonal iteration and a QR decomposition every ``precondition_every`` steps
# (algorithm 4).
#
# In the eigenbasis of its own statistics the first gradient is diagonal, and Adam would take full steps along the rounding
# errors beside the diagonal. So, as in the authors' implementation, a gradient enters the basis only after it was used, and the
# first gradient only starts the statistics.


class Soap(MatrixRule):
    """State: Adam's moments (the second one in the basis), the statistics ``left`` and ``right``, and their bases."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """Return the change of a matrix at step ``number``, from 1: Adam in the eigenbases of its blocks. Updates
        ``state`` in place.

        The first step only collects statistics, and computes the first bases: its change is zero. Later steps count
        as Adam's step ``number - 1``.
        """
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
            # This gradient enters the statistics only now, and the basis when it is due (algorithm 4).
            self._follow(block.left(state["left"]), left, part @ part.T, number)
            self._follow(block.right(state["right"]), right, part.T @ part, number)
        return change

    def _adam(
        self, gradient: Tensor, mean: Tensor, squares: Tensor, left: Tensor, right: Tensor, number: int
    ) -> Tensor:
        """Return Adam's step ``number`` for a block, computed in the bases ``left`` and ``right`` and turned back.
        ``squares``, the second moment in the bases, is updated; ``mean`` already contains ``gradient``.
        """
        spec = self.spec
        squares.lerp_((left.T @ gradient @ right).square(), 1 - spec.beta2)
        root = squares.sqrt().div_(math.sqrt(1 - power(spec.beta2, number))).add_(spec.eps)
        turned = (left.T @ mean @ right).div_(1 - power(spec.beta1, number))
        step: Tensor = left @ turned.div_(root) @ right.T
        return step

    def _follow(self, statistics: Tensor, basis: Tensor, square: Tensor, number: int) -> None:
        """Average the gradient's ``square`` into ``statistics``, in place. Compute ``basis`` by eigenvectors at step
        1, and refine it by one QR step every ``precondition_every`` steps.
        """
        statistics.lerp_(square, 1 - self.spec.beta2)
        if number == 1:
            basis.copy_(torch.linalg.eigh(statistics.double()).eigenvectors.flip(-1))
        elif number % self.spec.precondition_every == 0:
            basis.copy_(torch.linalg.qr(aligned(statistics) @ aligned(basis)).Q)


# Adafactor: the second moment of a matrix from its row and column means (Shazeer and Stern, arXiv 1804.04235).
#
# AdamW stores a running mean of every squared gradient. Here only the means of rows and of columns are stored, and their outer
# product estimates the full second moment. A change that is larger than usual is scaled down (section 6 of the paper). The
# decay of the running mean is ``1 - t^-0.8`` until it reaches ``beta2``.
#
# This is the variant of Zhai et al. (arXiv 2106.04560, section 3.4). The learning rate is not multiplied by the size of the
# weights, so AdamW's applies. With ``beta1 > 0`` changes are averaged, which costs as much memory as AdamW's first moment. With
# ``beta1 = 0`` it is the memory-saving optimizer of the paper.


_DECAY_EXPONENT = 0.8
_SMALLEST_SQUARE = 1e-30
_LARGEST_RMS = 1.0


class Adafactor(MatrixRule):
    """State: mean squares of rows and columns, and, unless ``beta1`` is 0, the mean of changes, ``exp_avg``."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """Return the change of a matrix: the gradient over factored root mean squares, clipped in RMS, averaged if ``beta1`` is
        set.

        Updates ``state`` and overwrites ``gradient``.
        """
        of_rows, of_columns = state["row_mean_square"], state["column_mean_square"]
        # At step 1 the weight is 1: the mean of one gradient is that gradient.
        weight = max(power(number, -_DECAY_EXPONENT), 1 - self.spec.beta2)
        squares = gradient.square()
        of_rows.lerp_(squares.mean(1), weight)
        of_columns.lerp_(squares.mean(0), weight)
        row_factor = of_rows / of_rows.mean().clamp(min=_SMALLEST_SQUARE)
        variance = row_factor[:, None] * of_columns[None, :]
        change = gradient.mul_(variance.clamp_(min=_SMALLEST_SQUARE).rsqrt_())
        rms = change.norm() / math.sqrt(change.numel())
        change.div_((rms / _LARGEST_RMS).clamp(min=1.0))
        if not self.spec.beta1:
            return change
        return state["exp_avg"].lerp_(change, 1 - self.spec.beta1).clone()


# Muon: orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
#
# Nesterov momentum is replaced by the nearest matrix with all singular values near one: a step in all directions of the matrix
# instead of the few that dominate its gradient. A Newton-Schulz iteration computes it with matrix products alone. The change is
# scaled by ``0.2 sqrt(max(rows, columns))``, so that its elements are about as large as AdamW's, and AdamW's learning rate and
# decay apply (Moonlight, arXiv 2502.16982, section 2.2).


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic: steepest at zero among those that keep singular values within about [0.7, 1.2]."""
_SMALLEST_MUON_NORM = 1e-7


class Muon(MatrixRule):
    """State: the gradient's running mean, ``momentum``."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:  # noqa: ARG002
        """Return the orthogonalized Nesterov momentum, scaled to the RMS of Adam's steps. Updates ``state`` and overwrites
        ``gradient``."""
        momentum = state["momentum"]  # (rows, columns)
        momentum.lerp_(gradient, 1 - self.spec.beta1)
        direction = orthogonal(gradient.lerp_(momentum, self.spec.beta1), self.spec.newton_schulz_steps)
        return direction.mul_(0.2 * math.sqrt(max(gradient.shape)))


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return about ``U V^T`` where ``matrix = U S V^T``, fp32, by ``steps`` Newton-Schulz iterations. Computed in
    bf16 on a GPU, whose error is below the method's.
    """
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=_SMALLEST_MUON_NORM)
    x = x.to(torch.bfloat16) if x.is_cuda else x
    tall = x.shape[0] > x.shape[1]
    x = x.T.contiguous() if tall else x  # (short, long): the products below are with the shorter side
    for _ in range(steps):
        # One step of the quintic iteration: X <- a X + (b A + c A^2) X with A = X X^T, (short, short).
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    nearest: Tensor = x.T if tall else x
    return nearest.float().contiguous()


MATRIX_RULES: Mapping[str, type[MatrixRule]] = {
    "adafactor": Adafactor,
    "muon": Muon,
    "shampoo": Shampoo,
    "soap": Soap,
}
"""Value of ``optimizer.name`` -> the rule of its matrices."""

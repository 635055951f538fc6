"""Adafactor: the second moment of a matrix from its row and column means (Shazeer and Stern, arXiv 1804.04235).

AdamW keeps a running mean of every squared gradient. Here only the means of rows and of columns are kept, and the rest is
taken for their outer product: the memory of a matrix's second moment is that of its edges. A change that is larger than
usual is scaled down (section 6 of the paper). The running mean begins as an ordinary one, with a decay of ``1 - t^-0.8``,
until ``beta2`` is reached.

Of the variants, this is the one of Zhai et al. (arXiv 2106.04560, section 3.4): the learning rate is not multiplied by the
size of the weights, so that AdamW's carries over; and with ``beta1 > 0`` changes are averaged, which costs as much memory as
AdamW's first moment. With ``beta1 = 0`` it is the memory-saving optimizer of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from phalanx.train.optimizers.matrix.matrix_optimizer import MatrixRule

_DECAY_EXPONENT = 0.8
_SMALLEST_SQUARE = 1e-30
_LARGEST_RMS = 1.0


class Adafactor(MatrixRule):
    """Keeps mean squares of rows and columns, and, unless ``beta1`` is 0, the mean of changes, ``exp_avg``."""

    def change(self, gradient: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        of_rows, of_columns = state["row_mean_square"], state["column_mean_square"]
        # At step 1 the weight is 1: the mean of one gradient is that gradient.
        weight = max(number**-_DECAY_EXPONENT, 1 - self.spec.beta2)
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

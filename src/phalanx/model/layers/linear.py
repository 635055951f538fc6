"""A linear layer whose matrix product can be exchanged.

``y = x W^T + b`` as in ``torch.nn.Linear``, but the product is an attribute: a narrower format replaces it from outside
(``phalanx.train.transforms.precision``), while tensor parallelism wraps its communication around whichever product is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor], Tensor]
"""``(..., inputs)`` times the transpose of ``(outputs, inputs)``: ``(..., outputs)``."""


class Linear(nn.Linear):
    """``torch.nn.Linear`` with an exchangeable product; ``None`` is PyTorch's own."""

    product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        if self.product is None:
            return F.linear(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias

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


Affine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product and the bias that is added to it, which libraries do in one: ``torch.nn.functional.linear`` and others with its bits."""


class Linear(nn.Linear):
    """``torch.nn.Linear`` with an exchangeable product; ``None`` is PyTorch's own."""

    product: Product | None = None
    affine: Affine | None = None
    """In the place of ``torch.nn.functional.linear``; ``product`` goes before it."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        if self.product is None:
            return (F.linear if self.affine is None else self.affine)(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias

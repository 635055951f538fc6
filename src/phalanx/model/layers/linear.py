"""A linear layer whose matrix product can be exchanged.

``y = x W^T + b`` as in ``torch.nn.Linear``, but the product is an attribute: a narrower format replaces it from outside
(``phalanx.train.transforms.precision``), while tensor parallelism wraps its communication around whichever product is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    weight_is_derived: bool = False
    """True if it multiplies with tensors that derive from its weight, whose gradients are added up on their way to the parameter. The
    tensor does not tell: where activations are computed again, the parameter itself may stand for what derives from it."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        if self.product is None:
            return (F.linear if self.affine is None else self.affine)(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias


def note_derived_weights(module: nn.Module, names: Iterable[str]) -> None:
    """Tells the linear layers inside ``module`` whose weights are among its parameters ``names`` that they see what derives from them."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        layer = module.get_submodule(owner)
        if isinstance(layer, Linear) and attribute == "weight":
            layer.weight_is_derived = True

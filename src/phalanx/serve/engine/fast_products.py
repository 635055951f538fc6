"""Products of fast numerics: those of bf16 on a CPU without instructions for it, of which PyTorch would read the matrix once for each row."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.portable.library import is_available, operations
from phalanx.model.layers.linear import Linear


class FastProducts:
    """``torch.nn.functional.linear``, with the portable kernel for bf16."""

    def __init__(self) -> None:
        self._product = operations().mm

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(..., inputs)`` times the transpose of ``(outputs, inputs)``, plus ``(outputs,)``: ``(..., outputs)``."""
        outputs, inputs = matrix.shape
        # A model may have been moved since it got these products.
        on_cpu = matrix.dtype == torch.bfloat16 and x.device.type == "cpu"
        if not on_cpu or not x.numel() or torch.is_grad_enabled():
            return F.linear(x, matrix, bias)
        product: Tensor = self._product(x.reshape(-1, inputs), matrix.t())
        return (product if bias is None else product + bias).view(*x.shape[:-1], outputs)


def fast_products(model: nn.Module) -> FastProducts | None:
    """Return products that are faster than PyTorch's for ``model``; None where there are none."""
    weight = next(model.parameters())
    library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if (
        weight.dtype != torch.bfloat16
        or weight.device.type != "cpu"
        or (library and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    ):
        return None
    return _products()


def use_fast_products(model: nn.Module) -> FastProducts | None:
    """Give ``fast_products`` to the linear layers of ``model`` that have no other product yet."""
    products = fast_products(model)
    if products is None:
        return None
    for name, part in model.named_modules():
        if isinstance(part, Linear) and part.affine is None and not name.startswith("mtp."):
            part.affine = products
    return products


@functools.cache
def _products() -> FastProducts | None:
    # One object, so that layers that have these products are known.
    return FastProducts() if is_available() else None

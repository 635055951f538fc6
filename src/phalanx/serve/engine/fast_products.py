"""Products of fast numerics: those of bf16 on a CPU without instructions for it, of which PyTorch would read the matrix once for each row."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.kernels.rows.product import BF16_CHAINS, row_kernel
from phalanx.model.layers.linear import Linear


class FastProducts:
    """``torch.nn.functional.linear``, with the kernel of few rows for bf16."""

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(..., inputs)`` times the transpose of ``(outputs, inputs)``, plus ``(outputs,)``: ``(..., outputs)``."""
        outputs, inputs = matrix.shape
        kernel, rows = row_kernel(), x.numel() // inputs
        # A model may have been moved since it got these products.
        on_cpu = matrix.dtype == torch.bfloat16 and x.device.type == "cpu"
        if kernel is None or not on_cpu or not rows or torch.is_grad_enabled():
            return F.linear(x, matrix, bias)
        return kernel(x.reshape(-1, inputs), matrix, bias, BF16_CHAINS).view(*x.shape[:-1], outputs)


def fast_products(model: nn.Module) -> FastProducts | None:
    """Return products that are faster than PyTorch's for ``model``; None where there are none."""
    kernel, weight = row_kernel(), next(model.parameters())
    fit = (
        kernel is not None and kernel.fuses and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    )
    library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not fit or (library and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
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


def row_block(linear: Linear) -> int:
    """Return the block of inner elements by which the kernel of few rows adds a product.

    It is 0 if other processes have a part of the product, or if a library computes bf16 rows faster.
    """
    products = fast_products(linear)
    if products is not None:
        return BF16_CHAINS if linear.affine is products else 0
    inputs = 0 if linear.weight.dtype == torch.bfloat16 else linear.weight.shape[1]
    return inputs if linear.affine is None else 0


@functools.cache
def _products() -> FastProducts:
    # One object, so that layers that have these products are known.
    return FastProducts()

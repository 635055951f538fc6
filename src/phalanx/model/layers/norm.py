"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467): ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

On a GPU, and wherever code is compiled, PyTorch fuses this into one kernel. An eager CPU runs it as a dozen passes over
memory forward and backward, which is a twentieth of a step's time in a small model; ``_EagerRMSNorm`` writes the same
mathematics in fewer. Forward it keeps to the operations of ``F.rms_norm``, in their order, so that a model's logits have the
same bits on both paths and are those of a reference that calls PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.kernels.layer_kernel import layer_kernels
from phalanx.model.autograd import FunctionContext, apply_function


class _EagerRMSNorm(torch.autograd.Function):
    """For fp32 on a CPU. ``x`` ``(..., d)``, ``weight`` ``(d,)``."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return layer_kernels(x, weight).scaled(x, inverse, weight)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        gradient = upstream[0].contiguous()
        kernels = layer_kernels(gradient, x, weight)
        rows = kernels.multiplied(gradient, x, inverse).view(-1, x.shape[-1])
        grad_weight = rows.sum(0)
        # The part of the gradient along x changes nothing, since the norm takes lengths away.
        along = torch.mv(rows, weight).div_(x.shape[-1]).view_as(inverse)
        return kernels.straightened(gradient, x, inverse, weight, along), grad_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a gain; weights are named as in ``torch.nn.RMSNorm``."""

    def __init__(self, dim: int, eps: float, *, offset: bool = False) -> None:
        """With ``offset`` the gain is 1 + the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to the same shape and dtype."""
        if self.offset:
            # In fp32: beside 1, half precision would round most of a weight away.
            wide: Tensor = F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
            return wide.to(x.dtype)
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            return apply_function(_EagerRMSNorm, x.contiguous(), self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

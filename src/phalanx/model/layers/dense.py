"""Dense layers of a block: linear with a replaceable product, RMSNorm, and feed-forward.

``y = x W^T + b`` as in ``torch.nn.Linear``, but the product is an attribute. A narrower format replaces it from outside
(``phalanx.train.precision``), and tensor parallelism adds its communication around the current product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.kernels.layer_kernel import layer_kernels
from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.spec import ModelSpec

Product = Callable[[Tensor, Tensor], Tensor]
"""``(..., inputs)`` times the transpose of ``(outputs, inputs)``: ``(..., outputs)``."""


Affine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product plus bias in one call: ``torch.nn.functional.linear``, or another function with its bits."""


class Linear(nn.Linear):
    """``torch.nn.Linear`` with a replaceable product; ``None`` is PyTorch's own."""

    product: Product | None = None
    affine: Affine | None = None
    """Replacement for ``torch.nn.functional.linear``; ``product`` has priority."""
    weight_is_derived: bool = False
    """True if the layer multiplies with tensors derived from its weight, whose gradients are summed on their way to the parameter.

    The tensor itself does not show that: when activations are recomputed, the parameter may stand for the derived tensor.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(..., inputs)`` times the transposed weight, plus the bias if any: ``(..., outputs)``.
        Computed by ``product``, else by ``affine``, else by PyTorch.
        """
        if self.product is None:
            return (F.linear if self.affine is None else self.affine)(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias


def note_derived_weights(module: nn.Module, names: Iterable[str]) -> None:
    """Set ``weight_is_derived`` of the linear layers inside ``module`` whose weights are among its parameters
    ``names``; other names are ignored.
    """
    for name in names:
        owner, _, attribute = name.rpartition(".")
        layer = module.get_submodule(owner)
        if isinstance(layer, Linear) and attribute == "weight":
            layer.weight_is_derived = True


# Alignment of tensors in memory, if the bits depend on it.
#
# A matrix product may add in another order if an operand or the result is not aligned (oneMKL:
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html).
# Measured in fp32 with MKL 2024.2 on an AMD EPYC, with an operand or the result after a boundary: 10 % of 740 random products
# had other bits at a distance of 4 to 28 bytes, and none of 760 at 16, 32 or 48 bytes. PyTorch's allocations are aligned, but
# slices may not be. A rank with two slices of 7 x 33 numbers has the second within a cache line; a rank with only that slice
# has it at a boundary. So a tensor that is a slice in some layouts is copied unless it is aligned. Widths that are multiples of
# 64 bytes, as in all large models, are never copied.


_ON_PROCESSORS = 64
"""Bytes: a cache line, the alignment of PyTorch's CPU allocations (``c10/core/alignment.h``)."""
_ELSEWHERE = 256
"""Bytes: the largest alignment on which a GPU library's choice of kernel depends (cuBLASLt:
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t). PyTorch's GPU allocations are aligned to 512.
"""


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and aligned like a separate allocation: itself, or a copy."""
    boundary = _ON_PROCESSORS if x.device.type == "cpu" else _ELSEWHERE
    # The storage is aligned, so the offset in it decides.
    begins_within = x.storage_offset() * x.element_size() % boundary
    return x.clone(memory_format=torch.contiguous_format) if begins_within else x.contiguous()


# RMSNorm (Zhang and Sennrich, arXiv 1910.07467): ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.
#
# On a GPU, and in compiled code, PyTorch fuses this into one kernel. An eager CPU makes a dozen passes over memory forward and backward,
# a twentieth of a step's time in a small model; ``_EagerRMSNorm`` needs fewer. Its forward pass has the operations of ``F.rms_norm`` in
# their order. So a model's logits have the same bits on both paths, and equal those of a reference that calls PyTorch's.


class _EagerRMSNorm(torch.autograd.Function):
    """RMSNorm for fp32 on a CPU. ``x`` ``(..., d)``, ``weight`` ``(d,)``."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, weight, inverse)
        return layer_kernels(x, weight).scaled(x, inverse, weight)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of the input ``(..., d)`` and the weight ``(d,)``, the latter summed over all rows."""
        x, weight, inverse = ctx.saved_tensors
        gradient = upstream[0].contiguous()
        kernels = layer_kernels(gradient, x, weight)
        rows = kernels.multiplied(gradient, x, inverse).view(-1, x.shape[-1])  # (tokens, d)
        grad_weight = rows.sum(0)  # (d,)
        # The result does not depend on the length of x, so the gradient's component along x is removed.
        along = torch.mv(rows, weight).div_(x.shape[-1]).view_as(inverse)  # (..., 1)
        return kernels.straightened(gradient, x, inverse, weight, along), grad_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a gain; weights are named as in ``torch.nn.RMSNorm``."""

    def __init__(self, dim: int, eps: float, *, offset: bool = False) -> None:
        """Create the gain ``(dim,)``; with ``offset`` the gain is 1 + the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(..., dim)`` normalized and times the weight, or times 1 + weight with an offset: same shape and dtype."""
        if self.offset:
            # In fp32: half precision would lose most of a small weight when 1 is added.
            wide: Tensor = F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
            return wide.to(x.dtype)
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            return apply_function(_EagerRMSNorm, x.contiguous(), self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


# The feed-forward layer: gated (SwiGLU, Shazeer, arXiv 2002.05202), or plain GELU as in GPT-3.
#
# gpt-oss's gate is ``g sigmoid(1.702 g)`` of clamped ``g``, an approximation of GELU; it multiplies clamped values plus one.


def gated(spec: ModelSpec, gate: Tensor, values: Tensor) -> Tensor:
    """Return the activation of a gated layer: ``silu(gate) * values``, or tanh-GELU for "geglu".

    "swiglu-clamped" is gpt-oss's: both are clamped to ``swiglu_limit``, the gate only from above, and 1 is added to
    the values.
    """
    if spec.ffn == "swiglu-clamped":
        gate = gate.clamp(max=spec.swiglu_limit)
        values = values.clamp(-spec.swiglu_limit, spec.swiglu_limit)
        return (values + 1) * (gate * torch.sigmoid(gate * spec.swiglu_gain))
    return (F.gelu(gate, approximate="tanh") if spec.ffn == "geglu" else F.silu(gate)) * values


class FeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, the same with a GELU, or ``down(gelu(up(x)))``."""

    OUTPUT: ClassVar[str] = "down"
    """Name of the last matrix, whose inputs are divided if ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that ``by_tokens`` uses."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        """Build the layer; ``inner`` is the width between ``up`` and ``down``. A gate exists only if ``spec.ffn`` is gated."""
        super().__init__()
        self.spec = spec
        self.gate = Linear(spec.dim, inner, bias=spec.ffn_bias) if is_gated(spec) else None
        self.up = Linear(spec.dim, inner, bias=spec.ffn_bias)
        self.down = Linear(inner, spec.dim, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d)`` to ``(..., d)``."""
        return self.by_heads(self.by_tokens(x))

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """Token-wise inputs of all inner elements: the hidden states."""
        return (x,)

    def by_heads(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the result ``(..., d)`` of the inner elements whose weights the module has. The sum over all is the layer's result."""
        (x,) = inputs
        inner = F.gelu(self.up(x)) if self.gate is None else gated(self.spec, self.gate(x), self.up(x))
        output: Tensor = self.down(inner)
        return output

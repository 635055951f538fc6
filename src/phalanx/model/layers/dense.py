"""The dense layers of a block: linear with an exchangeable product, RMSNorm, and feed-forward.

``y = x W^T + b`` as in ``torch.nn.Linear``, but the product is an attribute: a narrower format replaces it from outside
(``phalanx.train.precision``), while tensor parallelism wraps its communication around whichever product is there.
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


# Alignment of tensors in memory, as far as it decides bits.
#
# A kernel for products may take another way, and so add in another order, where an operand or the result does not begin at a boundary of memory that it
# likes (of oneMKL:
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html). Memory that PyTorch
# allocates always begins at one (measured in fp32 with MKL 2024.2 on an AMD EPYC: of 740 random products with an operand or the result 4 to 28 bytes behind
# a boundary, 10 % had other bits; of 760 that were 16, 32 or 48 bytes behind one, none). A part of a larger tensor may not: the second of two parts of 7 x 33 numbers begins within a cache line if its rank has both,
# and at a boundary if another rank has it alone. So where a layout decides whether a tensor is a part of another, it is copied unless it begins as
# memory of its own does. Widths that are multiples of 64 bytes, as those of all large models are, are never copied.


_ON_PROCESSORS = 64
"""Bytes: a cache line, at which PyTorch's memory begins (``c10/core/alignment.h``)."""
_ELSEWHERE = 256
"""Bytes: the largest alignment by which a GPU's library of products chooses among its ways (cuBLASLt's,
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t); PyTorch's memory begins at 512."""


def aligned(x: Tensor) -> Tensor:
    """``x`` without gaps in memory, and begun where memory of its own would: itself, or a copy."""
    boundary = _ON_PROCESSORS if x.device.type == "cpu" else _ELSEWHERE
    # By its place in its storage, which is memory of its own.
    begins_within = x.storage_offset() * x.element_size() % boundary
    return x.clone(memory_format=torch.contiguous_format) if begins_within else x.contiguous()


# RMSNorm (Zhang and Sennrich, arXiv 1910.07467): ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.
#
# On a GPU, and wherever code is compiled, PyTorch fuses this into one kernel. An eager CPU runs it as a dozen passes over
# memory forward and backward, which is a twentieth of a step's time in a small model; ``_EagerRMSNorm`` writes the same
# mathematics in fewer. Forward it keeps to the operations of ``F.rms_norm``, in their order, so that a model's logits have the
# same bits on both paths and are those of a reference that calls PyTorch's.


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


# The feed-forward layer: gated (SwiGLU, Shazeer, arXiv 2002.05202), or plain GELU as in GPT-3.
#
# gpt-oss's gate is ``g sigmoid(1.702 g)``, an approximation of GELU, of clamped ``g``, and multiplies clamped values plus one.


def gated(spec: ModelSpec, gate: Tensor, values: Tensor) -> Tensor:
    """The activation of a gated layer: ``silu(gate) * values``, with "geglu" a GELU; "swiglu-clamped" is gpt-oss's."""
    if spec.ffn == "swiglu-clamped":
        gate = gate.clamp(max=spec.swiglu_limit)
        values = values.clamp(-spec.swiglu_limit, spec.swiglu_limit)
        return (values + 1) * (gate * torch.sigmoid(gate * spec.swiglu_gain))
    return (F.gelu(gate, approximate="tanh") if spec.ffn == "geglu" else F.silu(gate)) * values


class FeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, the same with a GELU, or ``down(gelu(up(x)))``."""

    OUTPUT: ClassVar[str] = "down"
    """The last matrix, whose inputs are divided where ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """The modules that ``by_tokens`` computes with."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        """``inner`` is the width between ``up`` and ``down``."""
        super().__init__()
        self.spec = spec
        self.gate = Linear(spec.dim, inner, bias=spec.ffn_bias) if is_gated(spec) else None
        self.up = Linear(spec.dim, inner, bias=spec.ffn_bias)
        self.down = Linear(inner, spec.dim, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d)`` to ``(..., d)``."""
        return self.by_heads(self.by_tokens(x))

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the inner elements read of each token: its hidden state."""
        return (x,)

    def by_heads(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The result ``(..., d)`` of the inner elements whose weights are here; those of all add up to that of the layer."""
        (x,) = inputs
        inner = F.gelu(self.up(x)) if self.gate is None else gated(self.spec, self.gate(x), self.up(x))
        output: Tensor = self.down(inner)
        return output

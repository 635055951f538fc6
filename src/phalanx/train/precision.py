"""Matrix products of the blocks with 8-bit operands.

An H100 multiplies 8-bit floating-point numbers twice as fast as bf16. Their range and precision are small, so each operand
is divided by a scale beforehand, chosen from its own largest element at the moment of use ("dynamic scaling"; Micikevicius
et al., arXiv 2209.05433), and the product is accumulated in a wide format. The formats differ in the elements that share a
scale; they follow the recipes of the same names in torchao:

- ``fp8-tensorwise``: the whole operand; e4m3 forward, e5m2 (more range) for gradients.
- ``fp8-rowwise``: a row of the product's left operand or a column of its right; e4m3 throughout.
- ``mxfp8``: 32 elements that follow each other in the sum (OCP Microscaling, arXiv 2310.10537); e4m3 throughout.

Scales are powers of two in all of them. Dividing by one rounds nothing, and a quantized number is exact in bf16: where the
hardware lacks a format, multiplying the same numbers in the compute format gives the same result up to the order of sums.
So every format can be tried, and is tested, on a laptop.

A scale is a function of this rank's operands of this micro-batch alone, never of a history or of other ranks, so the bits do
not depend on the number of data-parallel ranks. For the same reason grouped products have their scales by row, or by 32
elements of a row: a row's scale does not depend on the experts of its rank, nor on the tokens beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.local.device import on_gpu
from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.dense import Linear
from phalanx.model.layers.expert_groups import Groups
from phalanx.model.layers.moe import Experts
from phalanx.model.narrow import SHARING, Quantized, Scaling, dequantize, quantize
from phalanx.model.transformer import Block
from phalanx.run.spec import RunSpec

_BLOCK = SHARING  # the summed dimension must be a multiple of it, also for the kernels
_TILE = 16  # the number of outputs must be a multiple of it for the kernels


@dataclass(frozen=True)
class Format:
    """The format of a product's operands."""

    scaling: Scaling
    """The elements that share a scale."""
    forward: torch.dtype
    """The format of activations and weights."""
    gradient: torch.dtype
    """The format of gradients."""
    capability: tuple[int, int]
    """The first CUDA compute capability with a kernel for it."""


FORMATS = {
    "fp8-tensorwise": Format("tensor", torch.float8_e4m3fn, torch.float8_e5m2, (8, 9)),
    "fp8-rowwise": Format("row", torch.float8_e4m3fn, torch.float8_e4m3fn, (9, 0)),
    "mxfp8": Format("block", torch.float8_e4m3fn, torch.float8_e4m3fn, (10, 0)),
}


def apply_precision(module: nn.Module, spec: RunSpec, *, wide: bool = False) -> None:
    """Make the blocks' linear layers and experts multiply in the format ``spec.precision.matmul``, or with ``wide`` in that of the
    weights.

    With ``matmul = "compute"``, change nothing. Router, embedding, output projection and norms stay as they are. May be
    called again between two steps, unless blocks are compiled.
    """
    if spec.precision.matmul == "compute":
        return
    linear = None if wide else NarrowProduct(spec.precision.matmul)
    grouped = None if wide else NarrowGroupedProduct(spec.precision.matmul)
    for block in (part for part in module.modules() if isinstance(part, Block)):
        for part in block.modules():
            # An equal product stays: compiled blocks may be compiled again for another object.
            if isinstance(part, Linear) and part.product != linear:
                part.product = linear
            elif isinstance(part, Experts) and part.product != grouped:
                part.product = grouped


@dataclass(frozen=True)
class NarrowProduct:
    """``phalanx.model.layers.dense.Product`` with operands of a narrow format, forward and in both products of backward."""

    format: str

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """``(..., inputs)`` times the transpose of ``(outputs, inputs)``: ``(..., outputs)``, in ``x``'s dtype."""
        rows = apply_function(_NarrowProduct, x.flatten(0, -2), weight, self.format)  # (tokens, outputs)
        return rows.view(*x.shape[:-1], -1)  # (..., outputs)


@dataclass(frozen=True)
class NarrowGroupedProduct:
    """``phalanx.model.layers.moe.GroupedProduct`` with operands of a narrow format, forward and for the gradient of the rows.

    The matrices' gradient is a sum over each expert's tokens, whose number only the accelerator knows; it is computed in the
    compute format, as in torchao's recipes with a high-precision weight gradient.
    """

    format: str

    def __call__(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """``(m, i)``, ``(experts, o, i)`` and the rows' groups to ``(m, o)``, in the rows' dtype."""
        return apply_function(_NarrowGroupedProduct, rows, matrices, groups, self.format)


class _ProductContext(FunctionContext, Protocol):
    name: str
    """The format's, one of ``FORMATS``."""


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ProductContext, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Return ``x`` times the transpose of ``weight``, quantized to the format ``name``; saves both, unquantized, for backward."""
        ctx.save_for_backward(x, weight)
        ctx.name = name
        narrow = FORMATS[name].forward
        return _product(x, weight, (narrow, narrow), FORMATS[name], fast=True)

    @staticmethod
    def backward(ctx: _ProductContext, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return both gradients by quantized products; None for one that is not needed."""
        x, weight = ctx.saved_tensors
        form, gradient = FORMATS[ctx.name], upstream[0]
        dtypes = (form.gradient, form.forward)
        grad_x = _product(gradient, weight.t(), dtypes, form) if ctx.needs_input_grad[0] else None
        grad_weight = _product(gradient.t(), x.t(), dtypes, form) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _product(
    left: Tensor, right: Tensor, dtypes: tuple[torch.dtype, torch.dtype], form: Format, *, fast: bool = False
) -> Tensor:
    """Return ``left`` ``(m, k)`` times the transpose of ``right`` ``(n, k)``: ``(m, n)``, in ``left``'s dtype. Both
    are quantized along ``k``.

    Hardware without a kernel for the format multiplies the dequantized operands. ``fast`` allows the accumulation of
    Hopper's tensor cores, good enough forward but not for gradients.
    """
    kernel, outputs = has_kernel(form, left), right.shape[0]
    # Zeros add nothing to a sum and raise no largest element; kernels want multiples.
    left, right = _padded(left, 1, _BLOCK), _padded(right, _TILE if kernel else 1, _BLOCK)
    a, b = quantize(left, dtypes[0], form.scaling), quantize(right, dtypes[1], form.scaling)
    if kernel:
        product = multiply_narrow(a, b, form.scaling, left.dtype, fast=fast)
        return product[:, :outputs] if len(right) > outputs else product
    return dequantize(a, left.dtype) @ dequantize(b, left.dtype).t()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` ``(..., r, k)`` with zeros after its end, up to multiples of ``rows`` and ``columns``."""
    more_rows, more_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    return F.pad(x, (0, more_columns, 0, more_rows)) if more_rows or more_columns else x


def has_kernel(form: Format, operand: Tensor) -> bool:
    """True if the device of ``operand`` has a kernel for this format (with bf16 around it)."""
    if not on_gpu(operand.device) or operand.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(operand.device) >= form.capability


def multiply_narrow(
    a: Quantized, b: Quantized, scaling: Scaling, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return ``a`` ``(m, k)`` times the transpose of ``b`` ``(n, k)`` by the hardware's own kernel: ``(m, n)`` in
    ``dtype``. ``fast`` allows less exact accumulation.

    ``k`` is a multiple of 32, ``n`` of 16.
    """
    scales = _kernel_scale(a.scale, scaling), _kernel_scale(b.scale, scaling)
    # The kernel finds the format by the scales. Of torch's two names for it, this is the one that every supported version can compile.
    product: Tensor = torch._scaled_mm(
        a.values.contiguous(),
        b.values.contiguous().t(),
        scales[0],
        scales[1].t() if scaling == "row" else scales[1],
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product


def _kernel_scale(scale: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales of ``(r, k)`` in the layout of the kernel: unchanged, or by block as flat e8m0 exponents in
    the order of the tensor cores' tiles.
    """
    if scaling != "block":
        return scale
    # Tiles of 128 rows by 4 blocks; within a tile the rows r, r + 32, r + 64 and r + 96 are neighbors (cuBLAS, "1D block
    # scaling factors layout").
    rows, blocks = scale.shape
    padded = F.pad(scale, (0, -blocks % 4, 0, -rows % 128))
    tiled = padded.view(len(padded) // 128, 4, 32, -1, 4)  # (row tiles, 4, 32, block tiles, 4)
    # (row tiles, block tiles, 32, 4, 4), flat
    return tiled.permute(0, 3, 2, 1, 4).to(torch.float8_e8m0fnu).flatten()


class _GroupedContext(_ProductContext, Protocol):
    groups: Groups


class _NarrowGroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupedContext, rows: Tensor, matrices: Tensor, groups: Groups, name: str) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.name, ctx.groups = name, groups
        narrow = FORMATS[name].forward
        return _grouped_product(rows, matrices, groups, (narrow, narrow), FORMATS[name], fast=True)

    @staticmethod
    def backward(ctx: _GroupedContext, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the rows' gradient by quantized products, and the matrices' in the wide format. ``None`` for one that
        is not needed, and for matrices whose gradient ``Groups.gradient`` passed on.
        """
        rows, matrices = ctx.saved_tensors
        form, gradient = FORMATS[ctx.name], upstream[0].contiguous()
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[0]:
            dtypes = (form.forward, form.forward)
            # (m, i)
            grad_rows = _grouped_product(gradient, matrices.transpose(1, 2), ctx.groups, dtypes, form)
        if ctx.needs_input_grad[1]:
            grad_matrices = ctx.groups.gradient(gradient, rows)
        return grad_rows, grad_matrices, None, None


def _grouped_product(
    rows: Tensor,
    matrices: Tensor,
    groups: Groups,
    dtypes: tuple[torch.dtype, torch.dtype],
    form: Format,
    *,
    fast: bool = False,
) -> Tensor:
    """Return each of ``rows`` ``(m, k)`` times the transpose of its expert's matrix, of ``matrices`` ``(experts, n,
    k)``: ``(m, n)``. Both are quantized along ``k``.

    Scaling by tensor becomes scaling by row. Without a kernel for the format, the dequantized operands are
    multiplied.
    """
    rows, matrices = _padded(rows, 1, _BLOCK), _padded(matrices, 1, _BLOCK)
    scaling: Scaling = "row" if form.scaling == "tensor" else form.scaling
    a, b = quantize(rows, dtypes[0], scaling), quantize(matrices, dtypes[1], scaling)
    if scaling == "row" and has_kernel(form, rows):
        return multiply_narrow_groups(a, b, groups.ends, rows.dtype, fast=fast)
    wide = dequantize(b, rows.dtype)
    # (m, k) by (experts, k, n): (m, n)
    return groups.multiply(dequantize(a, rows.dtype), wide.transpose(1, 2))


def multiply_narrow_groups(
    a: Quantized, b: Quantized, ends: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Compute ``_grouped_product`` by the hardware's own kernel, for operands with one scale a row. ``ends`` has the
    end of each expert's rows.
    """
    # Values (m, k) and (experts, k, n), scales (m,) and (experts, n): (m, n)
    product: Tensor = torch._scaled_grouped_mm(
        a.values.contiguous(),
        b.values.contiguous().transpose(1, 2),
        a.scale.flatten(),
        b.scale.squeeze(-1).contiguous(),
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product

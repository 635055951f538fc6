"""The products and the attention of ``products.c`` and ``attention.c``, on PyTorch's tensors.

Operands are fp32 or bf16, in any layout of memory; terms and sums are fp32 (a product of two bf16 numbers is exact in it), and a result of bf16
operands is rounded once, at the end. Each function computes on one thread or divides rows or columns, on which no bit depends.
"""

from __future__ import annotations

import ctypes
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import compiled

_SOURCE = Path(__file__).with_name("products.c")
_BESIDE = (_SOURCE.with_name("attention.c"),)
_LEAST_SHARE = 1 << 22
"""Multiply-adds for which it pays to start a thread: about a tenth of a millisecond."""
_ROWS, _COLUMNS = 96, 16
"""Rows and columns that ``products.c`` lays side by side: threads get whole multiples."""


class _Matrix(ctypes.Structure):
    """``matrix`` of ``matrix.h``: where it lies, elements from a row and from a column to the next, 1 if bf16."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("narrow", ctypes.c_int32),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled(_SOURCE, beside=_BESIDE)))
    pointer: Any = ctypes.c_void_p
    count: Any = ctypes.c_int64
    flag: Any = ctypes.c_int32
    library.products.argtypes = [count] * 4 + [pointer, count] * 2 + [pointer, flag]
    library.attention.argtypes = [pointer] * 3 + [ctypes.c_float, flag, pointer, flag, pointer]
    library.attention_backward.argtypes = [pointer] * 3 + [ctypes.c_float, flag] + [pointer] * 4 + [flag]
    return library


def load() -> None:
    """Compiles and loads the library. Raises ``NoHostKernelsError`` or ``OSError`` if it cannot be had."""
    _library()


def _matrix(tensor: Tensor) -> _Matrix:
    """The last two dimensions of ``tensor``."""
    _require(tensor)
    row, column = tensor.stride()[-2:]
    return _Matrix(tensor.data_ptr(), row, column, int(tensor.dtype == torch.bfloat16))


def _require(tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(
            f'portable numerics has products of fp32 and bf16, not of {tensor.dtype}: set runtime.numerics = "native"'
        )


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The products ``(..., m, n)`` of ``(..., m, k)`` and ``(..., k, n)``, of none or one equal dimension ahead, contiguous, of their dtype."""
    if left.dtype != right.dtype or left.shape[:-2] != right.shape[:-2] or left.shape[-1] != right.shape[-2]:
        raise RuntimeError(
            f"matrices {tuple(left.shape)} of {left.dtype} and {tuple(right.shape)} of {right.dtype} cannot be multiplied"
        )
    _require(left)
    rows, columns = left.shape[-2], right.shape[-1]
    out = torch.empty((*left.shape[:-2], rows, columns), dtype=left.dtype)
    if out.numel() == 0:
        return out
    parts = _parts(left, right, out)
    if len(parts) == 1:
        _multiply(*parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda part: _multiply(*part), parts))
    return out


def _parts(left: Tensor, right: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A product as several, of whole rows or products of a batch, one for each thread of PyTorch's if that pays."""
    threads = min(torch.get_num_threads(), out.numel() * left.shape[-1] // _LEAST_SHARE)
    if threads <= 1:
        return [(left, right, out)]
    if left.dim() > 2:
        size = math.ceil(len(left) / threads)
        return list(
            zip(torch.split(left, size), torch.split(right, size), torch.split(out, size), strict=True)
        )
    size = math.ceil(len(left) / threads / _ROWS) * _ROWS
    return [
        (rows, right, to) for rows, to in zip(torch.split(left, size), torch.split(out, size), strict=True)
    ]


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    batch = len(left) if left.dim() > 2 else 1
    steps = [tensor.stride(0) if tensor.dim() > 2 else 0 for tensor in (left, right)]
    one, other = _matrix(left), _matrix(right)
    failed = _library().products(
        batch, left.shape[-2], right.shape[-1], left.shape[-1],
        ctypes.byref(one), steps[0], ctypes.byref(other), steps[1],
        out.data_ptr(), other.narrow,
    )  # fmt: skip
    _require_memory(failed)


def _require_memory(failed: int) -> None:
    if failed:
        raise MemoryError("there is no memory for the workspace of a product")


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the logarithms of its denominators.

    Args:
        query: ``(b, h, q, e)``.
        key: ``(b, k, n, e)``; ``k`` divides ``h``.
        value: ``(b, k, n, v)``.
        bias: ``(b or 1, h or 1, q, n)``, added to the scores.
        scale: Factor of the scores.
        causal: True if query ``i`` sees keys up to ``i`` only.

    Returns:
        ``(b, h, q, v)``, tokens' heads side by side in memory, of the dtype of ``query``; ``(b, h, q)``, fp32.
    """
    shape = _shape(query, key, value)
    batch, heads, queries, width = *query.shape[:3], value.shape[-1]
    out = query.new_empty(batch, queries, heads, width)
    log_sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    matrices, steps = _inputs(query, key, value, _spread(bias, query, key))
    narrow = int(query.dtype == torch.bfloat16)
    failed = _library().attention(
        shape, matrices, steps, scale, int(causal), out.data_ptr(), narrow, log_sums.data_ptr()
    )
    _require_memory(failed)
    return out.transpose(1, 2), log_sums


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    bias: Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``attend``'s query, key and value, in their shapes and dtype. Shapes are those of ``attend``."""
    shape = _shape(query, key, value)
    gradients = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value))
    matrices, steps = _inputs(query, key, value, _spread(bias, query, key), grad_out, out)
    failed = _library().attention_backward(
        shape, matrices, steps, scale, int(causal), log_sums.contiguous().data_ptr(),
        *(gradient.data_ptr() for gradient in gradients), int(query.dtype == torch.bfloat16),
    )  # fmt: skip
    _require_memory(failed)
    return gradients[0], gradients[1], gradients[2]


def _shape(query: Tensor, key: Tensor, value: Tensor) -> ctypes.Array[ctypes.c_int64]:
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise RuntimeError(f"queries, keys and values of shapes {shapes} do not go together")
    sizes = (*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3])
    return (ctypes.c_int64 * 7)(*sizes)


def _spread(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return bias if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def _inputs(*tensors: Tensor | None) -> tuple[ctypes.Array[_Matrix], ctypes.Array[ctypes.c_int64]]:
    """Each tensor's matrices, and elements from a sequence and from a head to the next; an address of 0 for one that is missing."""
    matrices = [_Matrix(None, 0, 0, 0) if tensor is None else _matrix(tensor) for tensor in tensors]
    steps = [step for tensor in tensors for step in ((0, 0) if tensor is None else tensor.stride()[:2])]
    return (_Matrix * len(matrices))(*matrices), (ctypes.c_int64 * len(steps))(*steps)

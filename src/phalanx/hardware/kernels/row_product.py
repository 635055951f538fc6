"""The kernel of ``rows.c``: products of a few fp32 rows by the chain of roundings that a library's product of many rows has.

Decoding one text multiplies one row with every matrix, and exact numerics want the bits that the row has among many. The library's own product of
one row adds in another order, and sixteen rows take three times as long as reading the matrix does.
The work is dealt over the threads of the OpenMP runtime that PyTorch has loaded, which waits for it anyway; a second runtime would fight with it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import OPTIONS, NoHostKernelsError, compiled

MOST_ROWS = 8
"""Rows up to which the kernel takes no longer than a library (measured: AVX2, one thread)."""
_SOURCE = Path(__file__).with_name("rows.c")
_FUSED = (*(one for one in OPTIONS if "fp-contract" not in one), "-ffp-contract=fast", "-Wno-psabi")
_LEAST_SHARE = 1 << 16
"""Elements of a matrix for which another thread is woken."""


class RowKernel:
    """Rows times the transpose of a matrix on a CPU, fp32, in blocks of the inner dimension. Raises ``NoHostKernelsError``."""

    def __init__(self) -> None:
        try:
            library = compiled(_SOURCE, _FUSED)
            self.name = library.stem
            """Of its source and the compiler's options."""
            self._product = ctypes.CDLL(str(library)).row_product
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._product.argtypes = [*[pointer] * 4, *[count] * 4, pointer, count]
        self._product.restype = ctypes.c_int
        self._parallel = openmp()

    def __call__(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, block: int) -> Tensor:
        """``(m, i)`` times the transpose of ``(o, i)``, plus ``(o,)``: ``(m, o)``. Within ``block`` inner elements a result is a chain of fused
        multiply-adds; blocks are added one after the other, the first to the bias. Raises ``NoHostKernelsError`` on an unfit processor."""
        # Named, so that copies live for as long as they are read.
        rows, matrix, bias = (
            rows.contiguous(),
            matrix.contiguous(),
            None if bias is None else bias.contiguous(),
        )
        outputs, inputs = matrix.shape
        product = rows.new_empty(len(rows), outputs)
        threads = min(torch.get_num_threads(), 1 + matrix.numel() // _LEAST_SHARE)
        done = self._product(
            rows.data_ptr(),
            matrix.data_ptr(),
            None if bias is None else bias.data_ptr(),
            product.data_ptr(),
            len(rows),
            inputs,
            outputs,
            block,
            self._parallel,
            threads,
        )
        if not done:
            raise NoHostKernelsError("this processor has no fused multiply-add of eight fp32 elements")
        return product


def openmp() -> ctypes.c_void_p | None:
    """The entry of the OpenMP runtime in this process; ``None`` (one thread) if it has another interface."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return None


@functools.cache
def row_kernel() -> RowKernel | None:
    """The kernel; ``None`` where it cannot be compiled or loaded."""
    try:
        return RowKernel()
    except NoHostKernelsError:
        return None

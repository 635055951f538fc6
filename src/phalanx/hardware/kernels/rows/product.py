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

MOST_ROWS = 48
"""Rows up to which the kernel takes no longer than a library (measured: AVX2, one thread)."""
_FOLDER = Path(__file__).parent
_BESIDE = tuple(_FOLDER / name for name in ("attend.c", "layer.c"))
_OPTIONS = (*OPTIONS, "-Wno-psabi")
_LEAST_SHARE = 1 << 16
"""Elements of a matrix for which another thread is woken."""


class RowKernel:
    """Rows times the transpose of a matrix on a CPU, fp32, in blocks of the inner dimension. Raises ``NoHostKernelsError``."""

    def __init__(self) -> None:
        try:
            library = compiled(_FOLDER / "rows.c", _OPTIONS, beside=_BESIDE)
            self.name = library.stem
            """The digest of its source and the compiler's options."""
            self.library = ctypes.CDLL(str(library))
            self._product = self.library.row_product
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._product.argtypes = [*[pointer] * 4, *[count] * 4, pointer, count]
        self._product.restype = ctypes.c_int
        self.team = Team()
        self.fuses = bool(self.library.fuses())
        """Whether the processor has fused multiply-adds of eight elements."""

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
        done = self._product(
            rows.data_ptr(),
            matrix.data_ptr(),
            None if bias is None else bias.data_ptr(),
            product.data_ptr(),
            len(rows),
            inputs,
            outputs,
            block,
            self.team.parallel,
            self.team.threads(matrix.numel()),
        )
        if not done:
            raise NoHostKernelsError("this processor has no fused multiply-add of eight fp32 elements")
        return product


class Team:
    """The entries of the OpenMP runtime in this process; ``None`` (one thread) if it has another interface."""

    def __init__(self) -> None:
        entries = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
        process = ctypes.CDLL(None)
        found = [getattr(process, name, None) for name in entries]
        usable: list[ctypes.c_void_p | None] = [
            ctypes.cast(entry, ctypes.c_void_p) for entry in found if entry is not None
        ]
        if len(usable) < len(entries):
            usable = [None] * len(entries)
        self.parallel: ctypes.c_void_p | None = usable[0]
        self.barrier: ctypes.c_void_p | None = usable[1]
        self.number: ctypes.c_void_p | None = usable[2]
        self.members: ctypes.c_void_p | None = usable[3]

    def threads(self, elements: int) -> int:
        """How many to deal a matrix of so many elements to."""
        if self.parallel is None:
            return 1
        return min(torch.get_num_threads(), 1 + elements // _LEAST_SHARE)


@functools.cache
def row_kernel() -> RowKernel | None:
    """The kernel; ``None`` where it cannot be compiled or loaded."""
    try:
        return RowKernel()
    except NoHostKernelsError:
        return None

"""The kernels of ``rows.c`` and ``bf16.c``: products of rows by the chain of roundings that a library's product of many rows has.

Decoding one text multiplies one row with every matrix, and exact numerics want the bits that the row has among many. The library's own product of
one row adds in another order, and sixteen rows take three times as long as reading the matrix does. In bf16, without the instructions for it, PyTorch's product of many rows is one
scalar product after the other, each of which reads its row of the matrix: the kernel has the same bits and reads them once for up to 48 rows.
The work is dealt over the threads of the OpenMP runtime that PyTorch has loaded, which waits for it anyway; a second runtime would fight with it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import OPTIONS, NoHostKernelsError, compiled, is_to_compile

MOST_ROWS = 48
"""Rows up to which the kernel of fp32 takes no longer than a library (measured: AVX2, one thread)."""
BF16_CHAINS = 64
"""The one order of additions of the kernel of bf16: so many chains of fp32 beside each other, in the place of a block."""
_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "rows.c"
_BESIDE = tuple(_FOLDER / name for name in ("layer.c", "bf16.c", "layer_bf16.c"))
_OPTIONS = (*OPTIONS, "-Wno-psabi")
_LEAST_SHARE = 1 << 16
"""Elements of a matrix for which another thread is woken."""


class RowKernel:
    """Rows times the transpose of a matrix on a CPU, fp32 or bf16. Raises ``NoHostKernelsError``."""

    def __init__(self) -> None:
        try:
            library = compiled(_SOURCE, _OPTIONS, beside=_BESIDE)
            self.name = library.stem
            """The digest of its source and the compiler's options."""
            self.library = ctypes.CDLL(str(library))
            self._product, self._half_product = self.library.row_product, self.library.half_row_product
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._product.argtypes = [*[pointer] * 4, *[count] * 4, pointer, count]
        self._half_product.argtypes = [*[pointer] * 5, *[count] * 3, pointer, count]
        self._product.restype = self._half_product.restype = ctypes.c_int
        self.team = Team()
        self.fuses = bool(self.library.fuses())
        """Whether the processor has fused multiply-adds of eight elements."""

    def __call__(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, block: int) -> Tensor:
        """``(m, i)`` times the transpose of ``(o, i)``, plus ``(o,)``: ``(m, o)``. In fp32, within ``block`` inner elements a result is a chain of fused
        multiply-adds; blocks are added one after the other, the first to the bias. In bf16 it is ``BF16_CHAINS`` beside each other, added up to one to which the bias is
        added, and is rounded then. Raises ``NoHostKernelsError`` on an unfit processor."""
        # Named, so that copies live for as long as they are read.
        rows, matrix, bias = (
            rows.contiguous(),
            matrix.contiguous(),
            None if bias is None else bias.contiguous(),
        )
        (outputs, inputs), count = matrix.shape, len(rows)
        if rows.dtype != matrix.dtype or (bias is not None and bias.dtype != matrix.dtype):
            raise TypeError(f"rows of {rows.dtype} and a matrix of {matrix.dtype}: numbers of one format")
        product = rows.new_empty(count, outputs)
        operands = (rows.data_ptr(), matrix.data_ptr(), None if bias is None else bias.data_ptr())
        team = self.team.parallel, self.team.threads(matrix.numel())
        if matrix.dtype == torch.bfloat16:
            widened = torch.empty(count, inputs, dtype=torch.float32, device="cpu")
            places = product.data_ptr(), widened.data_ptr()
            done = self._half_product(*operands, *places, count, inputs, outputs, *team)
        else:
            done = self._product(*operands, product.data_ptr(), count, inputs, outputs, block, *team)
        if not done:
            raise NoHostKernelsError("this processor has no fused multiply-add of eight fp32 elements")
        return product


class Team:
    """The entries of the OpenMP runtime that PyTorch uses; ``None`` (one thread) if it has another interface."""

    def __init__(self) -> None:
        entries = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
        runtime = _openmp()
        symbols = [getattr(runtime, name, None) for name in entries]
        usable: list[ctypes.c_void_p | None] = [
            ctypes.cast(symbol, ctypes.c_void_p) for symbol in symbols if symbol is not None
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


def _openmp() -> ctypes.CDLL:
    """PyTorch's own library, through which the loader finds its OpenMP runtime; the whole process for a build without that file.

    Python loads PyTorch locally, so its runtime is among the global symbols only of builds that load it globally, as those for x86-64 do."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return ctypes.CDLL(None)


def most_rows(dtype: torch.dtype) -> int:
    """Rows up to which a kernel takes no longer than the library whose bits it has."""
    return sys.maxsize if dtype == torch.bfloat16 else MOST_ROWS


def row_kernel_is_to_compile() -> bool:
    """True if ``row_kernel`` will call the compiler, which takes seconds."""
    return is_to_compile(_SOURCE, _OPTIONS, beside=_BESIDE)


@functools.cache
def row_kernel() -> RowKernel | None:
    """The kernel; ``None`` where it cannot be compiled or loaded."""
    try:
        return RowKernel()
    except NoHostKernelsError:
        return None

"""The kernels of ``host.c`` on a CPU: compiled once for each user and machine (``phalanx.hardware.kernels.compiler``), called through ctypes.

Threads are Python's, each calling into C with a share of the elements while the interpreter's lock is released: an OpenMP runtime of
our own would fight with PyTorch's for the processors. They are started anew for each call, since a process may have forked in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError, compiled
from phalanx.hardware.kernels.reference import Kernels, UpdateFactors

SOURCE = Path(__file__).with_name("host.c")
_CHUNK = 1 << 26
_LEAST_SHARE = 1 << 18
"""Elements for which it pays to start a thread: about a tenth of a millisecond."""
Share = list[tuple[int, int, int]]
"""Pieces of tensors for one thread: the number of the tensor, the piece's first element, its length."""
T = TypeVar("T")


class HostKernels(Kernels):
    """One pass over fp32 tensors, each contiguous, on a CPU.

    ``mkl_roots`` takes square roots with the function that PyTorch's x86 builds take theirs with, from PyTorch's own copy of MKL; else
    they are C's. Only one of the two gives the bits of the reference. Raises ``NoHostKernelsError`` if what is needed cannot be had.
    """

    def __init__(self, *, mkl_roots: bool) -> None:
        self._roots: ctypes.c_void_p | None = None
        self._set_mkl_threads: Callable[[int], int] | None = None
        try:
            library = ctypes.CDLL(str(compiled(SOURCE)))
            if mkl_roots:
                mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
                self._roots = ctypes.cast(mkl.vmsSqrt, ctypes.c_void_p)
                self._set_mkl_threads = mkl.MKL_Set_Num_Threads_Local
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._adamw, self._peak, self._extract = library.adamw, library.peak_bits, library.extract
        self._adamw.argtypes, self._adamw.restype = [pointer] * 4 + [count, pointer, pointer], None
        self._peak.argtypes, self._peak.restype = [pointer, count], ctypes.c_uint32
        self._extract.argtypes, self._extract.restype = [pointer, count, pointer, pointer], None

    def chunk_elements(self, device: torch.device) -> int:  # noqa: ARG002
        return _CHUNK

    def adamw(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        factors: UpdateFactors,
    ) -> None:
        columns = [[tensor.data_ptr() for tensor in column] for column in (weights, grads, means, squares)]
        numbers = (ctypes.c_float * len(factors))(*factors)

        def update(share: Share) -> None:
            with self._mkl_alone():
                for tensor, first, length in share:
                    starts = [column[tensor] + 4 * first for column in columns]
                    self._adamw(*starts, length, numbers, self._roots)

        _on_threads(update, weights)

    @contextmanager
    def _mkl_alone(self) -> Iterator[None]:
        """Keeps MKL from starting threads of its own for this thread's few numbers at a time."""
        if self._set_mkl_threads is None:
            yield
            return
        before = self._set_mkl_threads(1)
        try:
            yield
        finally:
            self._set_mkl_threads(before)

    def peak(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:  # noqa: ARG002
        starts = [tensor.data_ptr() for tensor in tensors]

        def largest(share: Share) -> int:
            return max(int(self._peak(starts[tensor] + 4 * first, length)) for tensor, first, length in share)

        bits = max(_on_threads(largest, tensors), default=0)
        return torch.tensor(bits, dtype=torch.int32).view(torch.float32).double()

    def extracted_sums(
        self,
        tensors: Sequence[Tensor],
        constants: tuple[float, float],
        device: torch.device,  # noqa: ARG002
    ) -> Tensor:
        starts, numbers = [tensor.data_ptr() for tensor in tensors], (ctypes.c_double * 2)(*constants)

        def added(share: Share) -> tuple[float, float]:
            sums = (ctypes.c_double * 2)()
            for tensor, first, length in share:
                self._extract(starts[tensor] + 4 * first, length, numbers, sums)
            return sums[0], sums[1]

        parts = torch.tensor(_on_threads(added, tensors), dtype=torch.float64)
        return parts.view(-1, 2).sum(0)  # exact in any order


def shares_of(sizes: Sequence[int], threads: int) -> list[Share]:
    """Divides the elements of tensors of ``sizes`` into at most ``threads`` shares of nearly equal length, none of them empty."""
    total = sum(sizes)
    count = max(1, min(threads, total // _LEAST_SHARE))
    ends = [total * (number + 1) // count for number in range(count)]
    shares: list[Share] = [[] for _ in ends]
    done, current = 0, 0
    for tensor, size in enumerate(sizes):
        first = 0
        while first < size:
            length = min(size - first, ends[current] - done)
            shares[current].append((tensor, first, length))
            first, done = first + length, done + length
            if done == ends[current]:
                current += 1
    return [share for share in shares if share]


def _on_threads(work: Callable[[Share], T], tensors: Sequence[Tensor]) -> list[T]:
    """The results of ``work`` on shares of all elements, one for each of PyTorch's threads if that pays."""
    shares = shares_of([tensor.numel() for tensor in tensors], torch.get_num_threads())
    if len(shares) <= 1:
        return [work(share) for share in shares]
    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(work, shares))

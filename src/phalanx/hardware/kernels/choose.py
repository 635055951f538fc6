"""Choose the kernels for a device: fused ones of one pass over memory, if they compile and give the right bits, else the reference.

The fused kernels of a CPU are here; those of a GPU are in ``gpu.py``, the reference in ``reference.py``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError, compiled
from phalanx.hardware.kernels.reference import REFERENCE, Kernels, SpanRun, UpdateFactors
from phalanx.hardware.local.device import on_gpu

# The kernels of ``host.c`` and ``bins.c`` on a CPU, called through ctypes, compiled once for each user and machine.
#
# They run in Python threads, each of which calls C for a share of the elements, without the interpreter's lock. A second OpenMP
# runtime would compete with PyTorch's for the processors. Threads are started for each call, since the process may have forked
# in between.

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
        """Compile the kernels, unless they are cached, and load them. With ``mkl_roots``, square roots are those of
        PyTorch's MKL. Raises ``NoHostKernelsError``, also if PyTorch has none.
        """
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
        """Update ``weights``, ``means`` and ``squares`` in place by one step of AdamW, in one pass over memory, on
        PyTorch's number of threads. All are fp32 and contiguous.
        """
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
        """Context in which MKL uses one thread for calls of this thread; does nothing without MKL."""
        if self._set_mkl_threads is None:
            yield
            return
        before = self._set_mkl_threads(1)
        try:
            yield
        finally:
            self._set_mkl_threads(before)

    def peak(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:  # noqa: ARG002
        """Return the largest magnitude of all elements, 0-dim fp64; NaN if any is not a number, 0 without elements."""
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
        """Return the sums of both exact pieces of all squares of contiguous fp32 tensors, on several threads: fp64
        ``(2,)`` on the CPU. See ``extraction_constants``.
        """
        starts, numbers = [tensor.data_ptr() for tensor in tensors], (ctypes.c_double * 2)(*constants)

        def added(share: Share) -> tuple[float, float]:
            sums = (ctypes.c_double * 2)()
            for tensor, first, length in share:
                self._extract(starts[tensor] + 4 * first, length, numbers, sums)
            return sums[0], sums[1]

        parts = torch.tensor(_on_threads(added, tensors), dtype=torch.float64)
        return parts.view(-1, 2).sum(0)  # exact in any order


def shares_of(sizes: Sequence[int], threads: int) -> list[Share]:
    """Divide the elements of tensors of ``sizes`` into at most ``threads`` shares of nearly equal length, none of them
    empty. Each is a list of (tensor, first element, elements).
    """
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
    """Return the results of ``work`` on shares of all elements of ``tensors``: one for each of PyTorch's threads if
    there are enough elements, none without elements.
    """
    shares = shares_of([tensor.numel() for tensor in tensors], torch.get_num_threads())
    if len(shares) <= 1:
        return [work(share) for share in shares]
    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(work, shares))


# The kernel of ``bins.c``: add a gradient to an integer sum (``phalanx.parallel.reduction.reproducible_sums``) in one pass over
# memory.
#
# PyTorch's operations need nine passes for it, over pieces that stay in the cache.


_SOURCE = Path(__file__).with_name("bins.c")
_BINS_LEAST_SHARE = 1 << 18
"""Elements for which it pays to start a thread: about a tenth of a millisecond."""


AddToBins = Callable[[Tensor, Tensor, Tensor, Sequence[SpanRun], int], None]
"""Addition of a gradient to words and tops. See ``BinKernel.add``."""


def bin_kernel(device: torch.device) -> AddToBins:
    """Return the one-pass addition for ``device``.

    If there is none, raises ``NoHostKernelsError`` on a CPU, and ImportError on a GPU without Triton.
    """
    if on_gpu(device):
        from phalanx.hardware.kernels.gpu import add_to_bins

        return add_to_bins
    return BinKernel().add


class BinKernel:
    """Additions to words of 32 or 64 bits. Raises ``NoHostKernelsError`` if they cannot be compiled or loaded."""

    def __init__(self) -> None:
        """Compile the kernel, unless it is cached, and load it; raises ``NoHostKernelsError``."""
        try:
            library = ctypes.CDLL(str(compiled(_SOURCE)))
            self._adding = {torch.int32: library.add_to_int32, torch.int64: library.add_to_int64}
        except (OSError, AttributeError) as error:
            raise NoHostKernelsError(str(error)) from error
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        for function in self._adding.values():
            function.argtypes = [*[pointer] * 4, count, count, ctypes.c_int32]
            function.restype = None

    def add(self, gradient: Tensor, words: Tensor, tops: Tensor, runs: Sequence[SpanRun], width: int) -> None:
        """Add a gradient to words and tops, in place, on PyTorch's threads if it is large; each tensor's last
        dimension is contiguous.

        ``gradient`` is ``(shares, elements)``, fp32; ``words`` ``(shares, 2, elements)``, int32 or int64, upper and
        lower; ``tops`` ``(shares, spans)``, int8. ``runs`` are the spans of a share, and ``width`` the bits of a bin.
        """
        threads, function = torch.get_num_threads(), self._adding[words.dtype]

        def work(numbered_run: tuple[int, SpanRun]) -> None:
            """Add one run of spans of one share, by the kernel."""
            share, (element, span, spans, size) = numbered_run
            function(
                gradient[share].data_ptr() + element * gradient.element_size(),
                *(words[share, word].data_ptr() + element * words.element_size() for word in (0, 1)),
                tops[share].data_ptr() + span,
                spans,
                size,
                width,
            )

        pieces = [
            (share, part) for share in range(len(gradient)) for run in runs for part in _cut(run, threads)
        ]
        if threads == 1 or gradient.numel() < 2 * _BINS_LEAST_SHARE:
            for piece in pieces:
                work(piece)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, pieces))


def _cut(run: SpanRun, threads: int) -> Iterator[SpanRun]:
    """Yield a run in parts of nearly equal length: one for each thread, if each has at least ``_BINS_LEAST_SHARE`` elements."""
    element, span, spans, size = run
    parts = max(1, min(threads, spans * size // _BINS_LEAST_SHARE))
    each = -(-spans // parts)
    for first in range(0, spans, each):
        yield element + first * size, span + first, min(each, spans - first), size


_log = logging.getLogger(__name__)
_SIZES = (16400, 4096, 4099, 1)
"""Elements of the tensors of the check: more than a GPU's program takes, and a tail in whatever vectors a processor has."""


def kernels_for(device: torch.device, tensors: Iterable[Tensor]) -> Kernels:
    """The fastest kernels that take ``tensors``, all of them on ``device``."""
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return fused_kernels(device)
    return REFERENCE


@functools.cache
def fused_kernels(device: torch.device) -> Kernels:
    """Return the one-pass kernels of ``device``, or the reference if there are none. If candidates failed, that is
    logged as a warning.

    Each candidate is compiled and compared with the reference; kernels whose bits differ are not used. Cached.
    """
    failures: list[str] = []
    for make in _ways(device):
        try:
            kernels = make()
            differing = differences(kernels, device)
        except Exception as error:  # any failure of a compiler means that these kernels are missing
            failures.append(f"{type(error).__name__}: {error}")
            continue
        if not differing:
            return kernels
        failures.append(f"{' and '.join(differing)} had other bits than PyTorch's operations")
    if failures:
        _log.warning(
            "on %s, the optimizer and the gradient's norm go over memory several times instead of once, with the same bits: %s",
            device,
            "; ".join(failures),
        )
    return REFERENCE


def _ways(device: torch.device) -> list[Callable[[], Kernels]]:
    """Return the constructors of fused kernels that may work on ``device``, the best first."""
    if device.type == "cpu":
        # C's roots first: where MKL's differ in few numbers, the check could miss that, and portable numerics has C's.
        return [functools.partial(HostKernels, mkl_roots=mkl) for mkl in (False, True)]
    if on_gpu(device) and importlib.util.find_spec("triton") is not None:
        from phalanx.hardware.kernels.gpu import GpuKernels

        return [GpuKernels]
    return []


def differences(kernels: Kernels, device: torch.device, reference: Kernels = REFERENCE) -> list[str]:
    """Return the names of the results ("updates", "sums") in which ``kernels`` differ from ``reference`` on random
    numbers of all magnitudes, subnormal ones included.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> list[Tensor]:
        total = sum(_SIZES)
        sizes = torch.empty(total, dtype=torch.float64).uniform_(low, high, generator=generator).exp2()
        signs = torch.randint(0, 2, (total,), generator=generator) * 2 - 1
        return list(torch.split((sizes * signs).float().to(device), list(_SIZES)))

    weights, grads, means = draw(-60, 10), draw(-100, 10), draw(-140, 10)
    squares = [tensor.abs() for tensor in draw(-148, 20)]
    factors = UpdateFactors(0.37, 0.9, 1 - 0.9, 0.95, 1 - 0.95, math.sqrt(1 - 0.95**3), 1e-8, 1e-3, 0.9999)
    updated, summed = [], []
    for tried in (reference, kernels):
        columns = [[tensor.clone() for tensor in column] for column in (weights, grads, means, squares)]
        tried.adamw(columns[0], columns[1], columns[2], columns[3], factors)
        updated.append(torch.cat([tensor for column in columns for tensor in column]))
        constants = (1.5 * 2.0**36, 1.5 * 2.0**-1)  # squares up to 2^20, fewer than 2^15 of them
        sums = tried.extracted_sums(grads, constants, device)
        summed.append(torch.cat((tried.peak(grads, device).view(1), sums)))
    return [
        name
        for name, (expected, computed) in (("updates", updated), ("sums", summed))
        if not torch.equal(expected, computed)
    ]

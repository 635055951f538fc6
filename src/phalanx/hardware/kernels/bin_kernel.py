"""The kernel of ``bins.c``: adds a gradient to an integer sum (``phalanx.parallel.reduction.integer.bins``) in one pass over memory, on a CPU.

As a chain of PyTorch operations the same is nine passes over pieces that stay in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernels.compiler import NoHostKernelsError, compiled

_SOURCE = Path(__file__).with_name("bins.c")
_LEAST_SHARE = 1 << 18
"""Elements for which it pays to start a thread: about a tenth of a millisecond."""


SpanRun = tuple[int, int, int, int]
"""Consecutive spans of one size in a share of a gradient: the first one's first element, its number, how many there are, elements of each."""


class BinKernel:
    """Additions to words of 32 or 64 bits. Raises ``NoHostKernelsError`` if they cannot be compiled or loaded."""

    def __init__(self) -> None:
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
        """Adds to words and tops, in place; each tensor's last dimension lies in one piece.

        Args:
            gradient: ``(shares, elements)``, fp32.
            words: ``(shares, 2, elements)``, int32 or int64: upper and lower.
            tops: ``(shares, spans)``, int8.
            runs: The spans of a share.
            width: Bits of a bin.
        """
        threads, function = torch.get_num_threads(), self._adding[words.dtype]

        def work(one: tuple[int, SpanRun]) -> None:
            share, (element, span, spans, size) = one
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
        if threads == 1 or gradient.numel() < 2 * _LEAST_SHARE:
            for piece in pieces:
                work(piece)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, pieces))


def _cut(run: SpanRun, threads: int) -> Iterator[SpanRun]:
    """A run in parts of nearly equal length: one for each thread, if that pays."""
    element, span, spans, size = run
    parts = max(1, min(threads, spans * size // _LEAST_SHARE))
    each = -(-spans // parts)
    for first in range(0, spans, each):
        yield element + first * size, span + first, min(each, spans - first), size

"""Sums that do not depend on the order of their terms: of gradients in integers, and of squares for norms.

Gradients are added in two integer words an element, with one exponent a span. Integer addition is exact, so a sum depends neither on the order of slots nor on the library's choice of ring, tree or switch. The
difficulty is the common unit. Gradients arrive slot by slot, and the largest number is known only at the end. A sum in one word
would have to be shifted right whenever a larger number arrives, and the dropped bits would depend on the order.

So units are fixed. The line of exponents is divided into *bins* of ``width`` bits: the unit of bin ``k`` is ``2^(width k)``. A
number is cut into digits from the top. The first digit is its nearest multiple of the unit of the highest bin that it can reach, the
next is that of the remainder in the next bin, and so on. A digit depends on the number alone. For each span of elements, the two
highest bins that any slot reaches are kept: the integer sums of their digits (the words ``high`` and ``low``) and the number of the
upper bin (``top``). When a larger number arrives, complete bins move down and out. So the result depends only on the highest bin,
which is a maximum, and on sums of integers. This is the binned sum of Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE Trans.
Computers 64(7), 2015), and of Ahrens, Demmel and Nguyen, "Algorithms for Efficient Reproducible Floating Point Summation" (ACM TOMS
46(3), 2020), with integers instead of floating-point words: 32 bits a word instead of 24 for the same four bytes, and no
renormalization.

**Error.** Every slot's number is rounded once, to the nearest multiple of the lower unit ``u``. With ``n`` slots and ``M`` the
largest magnitude in the span in any slot, ``u <= 2^(1 - width) M`` and

    |sum - exact sum| <= n u / 2 <= n 2^-width M,      and then the sum is rounded to fp32.

That is the worst case, in which ``M`` just reaches its bin; on average there are ``width / 2`` more bits. A word must hold ``n``
digits of at most ``2^(width - 1)``: ``width`` is 28 for 8 slots, 25 for 64, 22 for 1,023. Beyond 1,024 slots words are int64, and
bins 32 bits wide.

**Alternatives.** One word with an exponent agreed by all slots is half the bytes. But all slots of a step must be there to agree, and
a rank computes its slots one after another. Exponents of the previous step must be kept with the weights. They fail in the rows of an
embedding, which are zero until their token occurs. An exponent for each element instead of each span costs two more bytes on the
wire, and bounds the error by the element's own magnitude. ``bench.train.integer_sums`` compares the first alternative with this
format and the fp32 tree.

All operations except the maximum and the sums are exact in floating point (scaling by powers of two, rounding to an integer,
subtracting the rounded part). So a fused kernel gives the same bits (``phalanx.hardware.kernels``). An
element that is not finite in any slot makes its sum NaN. The words of its span then count, for each element, the slots in which it
was not finite.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.kernels.choose import AddToBins, bin_kernel, kernels_for
from phalanx.hardware.kernels.reference import SpanRun
from phalanx.parallel.divisions import SpanLayout, share_layout, word_bytes

# Sums of squares that do not depend on the distribution of the numbers over ranks.
#
# The norm of the gradient runs over shards whose boundaries depend on the number of ranks, so an ordinary sum would round differently
# on every fleet. Here each square is first cut, without error, into two pieces that are multiples of fixed powers of two, coarse
# enough that *adding any number of pieces is exact*. Exact addition is associative, so order, shards and reduction algorithm do not
# matter. The cut is Rump's extraction as used by Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE Trans. Computers 64(7),
# 2015): ``q = (x + M) - M`` with a power of two ``M`` that depends only on the largest element and on the number of elements.
#
# The remainder below the second piece, less than ``n^2 2^-104`` of the largest square, is dropped, equally on every fleet.


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude in ``tensors``: 0-dim fp64; infinite if any element is infinite or not a number."""
    tensor_list = list(tensors)
    peak = kernels_for(device, tensor_list).peak(tensor_list, device)
    return torch.nan_to_num(peak, nan=math.inf, posinf=math.inf)


def extraction_constants(peak: float, count: int) -> tuple[float, float]:
    """Return the two constants ``M`` such that ``(M + x) - M`` cuts the squares of ``count`` numbers up to ``peak``
    into two exact pieces.

    1. Squares are at most ``2^e``. The first piece of each is a multiple of ``2^(k - 52)``, with ``k = e +
    bits(count)``. All of them together stay below ``2^(k + 1)``: 53 bits, so no addition rounds.

    2. The remainder of each square is below ``2^(k - 53)``, and the second constant cuts it in the same way.
    """
    exponent = 2 * math.frexp(peak)[1]
    bits = count.bit_length() + 1
    first = exponent + bits
    second = first - 53 + bits
    return 1.5 * math.ldexp(1.0, first), 1.5 * math.ldexp(1.0, second)


@torch.no_grad()
def extracted_sums(tensors: Iterable[Tensor], constants: tuple[float, float], device: torch.device) -> Tensor:
    """Return the exact sums of both pieces of every element's square: ``(2,)``, fp64."""
    tensor_list = list(tensors)
    return kernels_for(device, tensor_list).extracted_sums(tensor_list, constants, device)


def norm(tensors: list[Tensor], count: int, device: torch.device) -> float:
    """Return ``norms`` of one group of tensors over all ranks. A collective."""
    (result,) = norms([tensors], [count], device)
    return result


def norms(
    groups: Sequence[list[Tensor]],
    counts: Sequence[int],
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
) -> list[float]:
    """Return the Euclidean norm of each group's elements of all ranks, with the same bits on any layout. A collective.

    Args:
        groups: This rank's elements of each group, fp32 or narrower; over all ranks, every element exactly once.
        counts: Number of elements of each group over all ranks.
        device: Device of the tensors.
        ranks: The ranks that hold the elements; by default all.

    Returns:
        The norms; infinite if any element of the group is infinite or not a number.
    """
    peaks_everywhere = torch.stack([largest(tensors, device) for tensors in groups])  # (groups,)
    dist.all_reduce(peaks_everywhere, dist.ReduceOp.MAX, ranks)
    peaks = peaks_everywhere.tolist()
    sums = torch.zeros((len(groups), 2), dtype=torch.float64, device=device)
    for row, tensors, peak, count in zip(sums, groups, peaks, counts, strict=True):
        if tensors and 0.0 < peak < math.inf:
            row.copy_(extracted_sums(tensors, extraction_constants(peak, count), device))
    dist.all_reduce(sums, dist.ReduceOp.SUM, ranks)
    return [
        math.sqrt(first + second) if 0.0 < peak < math.inf else peak
        for peak, (first, second) in zip(peaks, sums.tolist(), strict=True)
    ]


_log = logging.getLogger(__name__)
_EMPTY, _NOT_FINITE = -128, 127
"""Tops of a span with only zeros so far, and of one with a number that is not finite."""
# Elements processed at once by PyTorch's operations. Temporaries fit into the cache of a core; on a GPU each takes 64 MiB, and
# launches are few.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 24


@dataclass(frozen=True)
class BinFormat:
    """Width of bins and of words for sums of ``count`` numbers; a property of the run."""

    count: int

    @property
    def dtype(self) -> torch.dtype:
        """Integer dtype of the words."""
        return torch.int32 if word_bytes(self.count) == 4 else torch.int64

    @property
    def width(self) -> int:
        """Bits of a bin: ``count`` digits of at most ``2^(width - 1)`` fit into a word."""
        return min((torch.iinfo(self.dtype).max // self.count).bit_length(), 32)


@dataclass(frozen=True)
class _Piece:
    """A part of all shares that is processed at once."""

    shares: slice
    elements: slice
    spans: slice
    size: int

    def of(self, elements: Tensor) -> Tensor:
        """Return this piece of a tensor by elements, ``(shares, elements)``, as ``(shares, spans, size)``."""
        part = elements[self.shares, self.elements]
        return part.view(len(part), -1, self.size)  # (shares, spans, size)

    def spans_of(self, spans: Tensor) -> Tensor:
        """Return this piece of a tensor by spans, ``(shares, spans)``, as ``(shares, spans, 1)``."""
        return spans[self.shares, self.spans].unsqueeze(-1)


@dataclass
class Bins:
    """Partial sum of gradients of shape ``(shares, elements)``."""

    layout: SpanLayout
    format: BinFormat
    words: Tensor
    """``(shares, 2, elements)``, int32 or int64: the sums of digits in the upper and in the lower bin."""
    tops: Tensor
    """``(shares, spans)``, int8: one more than the number of the upper bin, or one of the two special values."""
    use_kernel: bool = True
    """False: use PyTorch operations to add gradients, even if the device has a kernel."""
    chunk_elements: int | None = None
    """Elements that one PyTorch operation processes at once; by default, as many as fit into the device's cache."""

    @classmethod
    def empty(
        cls,
        shares: int,
        layout: SpanLayout,
        form: BinFormat,
        device: torch.device,
        *,
        use_kernel: bool = True,
        chunk_elements: int | None = None,
    ) -> Bins:
        """Return an empty sum of gradients ``(shares, elements)`` of ``layout``. ``use_kernel=False`` always adds by
        PyTorch's operations, in chunks of ``chunk_elements`` (``None``: the default of the device).
        """
        words = torch.zeros((shares, 2, layout.elements), dtype=form.dtype, device=device)
        tops = torch.full((shares, layout.spans), _EMPTY, dtype=torch.int8, device=device)
        return cls(layout, form, words, tops, use_kernel, chunk_elements)

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient, fp32 ``(shares, elements)``, in place: by the one-pass kernel if possible, else by
        operations, with the same bits.
        """
        kernel = _kernel(self.words.device) if self.use_kernel else None
        if kernel is not None and gradient.dtype == torch.float32 and gradient.stride(-1) == 1:
            kernel(gradient, self.words, self.tops, self._runs, self.format.width)
        else:
            self._add_by_operations(gradient)

    def _add_by_operations(self, gradient: Tensor) -> None:
        """Add a gradient in place, as ``add_gradient`` does, by a chain of PyTorch operations for any device, in
        chunks. A span with a number that is not finite counts these instead.
        """
        width = self.format.width
        self.raise_to(torch.maximum(self.tops, self._tops_of(gradient)))
        is_not_finite = self.tops == _NOT_FINITE
        any_not_finite = _any(is_not_finite)
        # The full factor can exceed the range of fp32, so it is applied in two halves.
        exponent = -width * (self._bins_above() - 1)  # (shares, spans)
        first, second = _power(exponent // 2).float(), _power(exponent - exponent // 2).float()
        buffers = gradient.new_empty((2, self._chunk))
        digits = self.words.new_empty(self._chunk)
        for piece in self._pieces():
            x = piece.of(gradient)  # (shares, spans, size)
            # (shares, spans, size) each
            remainder, high = (buffer[: x.numel()].view(x.shape) for buffer in buffers)
            digit = digits[: x.numel()].view(x.shape)  # (shares, spans, size)
            if any_not_finite:
                x = torch.where(piece.spans_of(is_not_finite), x.isfinite().logical_not().to(x.dtype), x)
            torch.mul(x, piece.spans_of(first), out=remainder).mul_(piece.spans_of(second))
            torch.round(remainder, out=high)  # upper digit: the nearest multiple of the upper bin's unit
            # lower digit: that of the remainder, in the next bin
            remainder.sub_(high).mul_(math.ldexp(1.0, width)).round_()
            for number, value in enumerate((high, remainder)):
                piece.of(self.words[:, number]).add_(digit.copy_(value))

    def add(self, other: Bins) -> None:
        """Add another sum of gradients of the same shape, in place. May raise the tops of ``other``."""
        tops = torch.maximum(self.tops, other.tops)
        self.raise_to(tops)
        other.raise_to(tops)
        self.words += other.words

    def raise_to(self, tops: Tensor) -> None:
        """Move this sum to the bins ``tops``, so that its words can be added to those of another sum with the same tops.

        ``tops`` is ``(shares, spans)``, none lower than the current one. Digits below the new bins are dropped.
        """
        up = tops.to(torch.int16) - self.tops
        # Zeros are the same in any bin; an empty sum has only zeros.
        up *= self.tops != _EMPTY
        if _any(up):
            for piece in self._pieces():
                bins = piece.spans_of(up)
                if _any(bins):
                    # (shares, spans, size) each
                    high, low = (piece.of(self.words[:, number]) for number in (0, 1))
                    low.copy_(torch.where(bins == 0, low, torch.where(bins == 1, high, 0)))
                    high.mul_(bins == 0)
        self.tops.copy_(tops)

    def total(self, out: Tensor) -> None:
        """Write the sum, rounded to fp32, into ``out`` ``(shares, elements)``.

        In a span with an infinite or undefined summand, the elements that have one are NaN, and all others 0.
        """
        width = self.format.width
        is_not_finite, unit = self.tops == _NOT_FINITE, _power(width * (self._bins_above() - 2))
        any_not_finite = _any(is_not_finite)
        buffer = torch.empty(self._chunk, dtype=torch.float64, device=out.device)
        for piece in self._pieces():
            high, low = (piece.of(self.words[:, number]) for number in (0, 1))  # (shares, spans, size) each
            value = buffer[: high.numel()].view(high.shape).copy_(high)  # (shares, spans, size)
            value.mul_(math.ldexp(1.0, width)).add_(low).mul_(piece.spans_of(unit))
            if any_not_finite:
                value = torch.where(
                    piece.spans_of(is_not_finite), torch.where(high > 0, math.nan, 0.0), value
                )
            piece.of(out).copy_(value)

    def _tops_of(self, gradient: Tensor) -> Tensor:
        """Return the tops ``(shares, spans)`` of one gradient: for each span the bin in which its magnitudes are at
        most half a unit; special values for zero spans and those that are not finite.
        """
        peaks = torch.empty(self.tops.shape, dtype=gradient.dtype, device=gradient.device)
        buffer = gradient.new_empty(self._chunk)
        for piece in self._pieces():
            x = piece.of(gradient)  # (shares, spans, size)
            magnitudes = torch.abs(x, out=buffer[: x.numel()].view(x.shape))  # (shares, spans, size)
            peaks[piece.shares, piece.spans] = magnitudes.amax(-1)  # (shares, spans)
        exponent = torch.frexp(peaks).exponent  # (shares, spans); every magnitude is below 2^exponent
        tops = torch.div(exponent + self.format.width, self.format.width, rounding_mode="floor")
        tops = torch.where(peaks > 0, tops, _EMPTY)
        return torch.where(peaks.isfinite(), tops, _NOT_FINITE).to(torch.int8)

    def _bins_above(self) -> Tensor:
        """Return the tops as int64; special spans get values that leave a digit 1 at 1, and 0 at 0."""
        special = (self.tops == _EMPTY) | (self.tops == _NOT_FINITE)
        return torch.where(special, 1, self.tops.long())

    @property
    def _runs(self) -> list[SpanRun]:
        return [
            (segment.first_element, segment.first_span, segment.spans, segment.size)
            for segment in self.layout.segments
        ]

    @property
    def _chunk(self) -> int:
        """Elements that are added at a time, by default more on a GPU than on a CPU."""
        if self.chunk_elements is not None:
            return self.chunk_elements
        return _CPU_CHUNK if self.words.device.type == "cpu" else _GPU_CHUNK

    def _pieces(self) -> Iterator[_Piece]:
        """Yield all elements in pieces of one span size and of at most ``_chunk`` elements, as slices of shares, elements and spans."""
        for segment in self.layout.segments:
            spans = self._chunk // segment.size  # at once, of one share
            shares = max(spans // segment.spans, 1)
            for share in range(0, len(self.words), shares):
                for first in range(0, segment.spans, spans):
                    last = min(first + spans, segment.spans)
                    yield _Piece(
                        slice(share, share + shares),
                        slice(
                            segment.first_element + first * segment.size,
                            segment.first_element + last * segment.size,
                        ),
                        slice(segment.first_span + first, segment.first_span + last),
                        segment.size,
                    )


def _any(mask: Tensor) -> bool:
    """Return False if no element of ``mask`` is true. Always True on an accelerator, where reading the mask would wait for the device."""
    return mask.device.type != "cpu" or bool(mask.any())


def _power(exponent: Tensor) -> Tensor:
    """Return two to the power of int64 exponents, exactly: fp64."""
    return ((exponent + 1023) << 52).view(torch.float64)


@functools.cache
def _kernel(device: torch.device) -> AddToBins | None:
    """Return the one-pass kernel of ``device``, built and verified once per process; ``None``, with a logged warning, if that fails."""
    try:
        add = bin_kernel(device)
        if matches_operations(add, device):
            return add
        reason = "its bits differed from those of PyTorch's operations"
    except Exception as error:  # a compiler that fails in any way is as good as none
        reason = f"{type(error).__name__}: {error}"
    _log.warning("sums in integers go over memory nine times instead of once, with the same bits: %s", reason)
    return None


def matches_operations(add: AddToBins, device: torch.device) -> bool:
    """Return True if kernel and operations give the same words and tops for two additions of numbers of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    layout = share_layout([(40, 24), (7,)], 1)
    sums = [Bins.empty(1, layout, BinFormat(8), device) for _ in range(2)]
    for low, high in ((-149.0, -100.0), (-60.0, 100.0)):
        sizes = torch.empty(1, layout.elements, dtype=torch.float64)
        numbers = sizes.uniform_(low, high, generator=generator).exp2().float()
        numbers *= torch.randint(-1, 2, numbers.shape, generator=generator)
        gradient = numbers.to(device)
        sums[0]._add_by_operations(gradient)
        add(gradient, sums[1].words, sums[1].tops, sums[1]._runs, sums[1].format.width)
    return torch.equal(sums[0].words, sums[1].words) and torch.equal(sums[0].tops, sums[1].tops)

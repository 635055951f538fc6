"""Reads the parts of boxes that a restore plan asks for out of the checksummed blocks of an image.

Whatever holds an image (a file, a segment of memory, a peer) hands out whole blocks, since only whole blocks can be checked.
Here the requested (possibly strided) parts of boxes are cut out of the checksummed blocks, in pieces that end where a block does: what
lies in one block is handed on as it is, and only an element that lies across two is put together first. If the reads come in the image's
order, every block is fetched once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.image import (
    ByteArray,
    ByteSpan,
    ImageEntry,
    RawArray,
    c_strides,
    spans,
    view_of,
)
from phalanx.checkpoint.format.manifest import Manifest
from phalanx.checkpoint.format.restore_plan import PlannedRead

BlockReader = Callable[[Sequence[int]], Iterator[ByteArray]]
"""Given the numbers of blocks, their bytes in turn, checked; each is valid until the next one is asked for."""


def read_parts(
    manifest: Manifest, reads: Sequence[PlannedRead], blocks: BlockReader
) -> Iterator[tuple[Box, RawArray]]:
    """Yields the parts that ``reads`` ask for of the image that ``manifest`` describes, in pieces within a block."""
    starts = {entry.box: entry.start for entry in manifest.entries}
    todo = [
        (ImageEntry(read.source.box, starts[read.source.box]), span)
        for read in reads
        for span in spans_in_blocks(read.source.box, read.part, starts[read.source.box], manifest.block_bytes)
    ]
    numbers = [number for entry, span in todo for number in _blocks_of(manifest, entry, span)]
    distinct = [number for number, _ in groupby(numbers)]
    window = _Window(blocks(distinct), distinct, manifest.block_bytes)
    for entry, span in todo:
        yield (
            span.part,
            view_of(entry.box, span, window.take(entry.start + span.start, entry.start + span.stop)),
        )


def spans_in_blocks(source: Box, part: Box, start: int, block_bytes: int) -> Iterator[ByteSpan]:
    """Cuts ``part`` of the stored box ``source``, which begins at byte ``start`` of its image, where blocks of the image end.

    Each piece lies in one block, or is a single element; together they are the part, in the order of their first bytes.
    """
    if not part.numel:
        return
    (whole,) = spans(source, part, source.nbytes)
    if part.numel == 1 or (start + whole.start) // block_bytes == (start + whole.stop - 1) // block_bytes:
        yield whole
        return
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    stride, rows = c_strides(source)[dim], part.shape[dim]
    row_bytes = whole.stop - whole.start - (rows - 1) * stride
    row = 0
    while row < rows:
        begin = start + whole.start + row * stride
        room = block_bytes - begin % block_bytes
        together = min(rows - row, (room - row_bytes) // stride + 1) if room >= row_bytes else 1
        yield from spans_in_blocks(source, _rows(part, dim, row, together), start, block_bytes)
        row += together


def _rows(part: Box, dim: int, first: int, count: int) -> Box:
    offset, shape = list(part.offset), list(part.shape)
    offset[dim] += first
    shape[dim] = count
    return part.part(tuple(offset), tuple(shape))


def _blocks_of(manifest: Manifest, entry: ImageEntry, span: ByteSpan) -> range:
    block_bytes = manifest.block_bytes
    return range((entry.start + span.start) // block_bytes, (entry.start + span.stop - 1) // block_bytes + 1)


class _Window:
    """A sliding window over an image's blocks, from which byte ranges are assembled."""

    def __init__(self, blocks: Iterator[ByteArray], numbers: Sequence[int], block_bytes: int) -> None:
        self._blocks = blocks
        self._numbers = iter(numbers)
        self._block_bytes = block_bytes
        self._number = -1
        self._block: ByteArray | None = None

    def take(self, start: int, stop: int) -> ByteArray:
        """The image's bytes ``start:stop``, valid until the next call."""
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        if first == last:
            return self._at(first)[start - first * self._block_bytes : stop - first * self._block_bytes]
        out = np.empty(stop - start, dtype=np.uint8)
        for number in range(first, last + 1):
            base = number * self._block_bytes
            low, high = max(start, base), min(stop, base + self._block_bytes)
            out[low - start : high - start] = self._at(number)[low - base : high - base]
        return out

    def _at(self, number: int) -> ByteArray:
        if self._block is None or number != self._number:
            self._number, self._block = next(self._numbers), next(self._blocks)
        return self._block

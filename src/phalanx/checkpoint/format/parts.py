"""Reads the parts of boxes that a restore plan asks for out of the checksummed blocks of an image.

Whatever holds an image (a file, a segment of memory, a peer) hands out whole blocks, since only whole blocks can be checked.
Here the requested (possibly strided) parts of boxes are cut out of the checksummed blocks. A part may span blocks. If the
reads come in the image's order, every block is fetched once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.image import ByteArray, ByteSpan, ImageEntry, RawArray, spans, view_of
from phalanx.checkpoint.format.manifest import Manifest
from phalanx.checkpoint.format.restore_plan import PlannedRead

BlockReader = Callable[[Sequence[int]], Iterator[ByteArray]]
"""Given the numbers of blocks, their bytes in turn, checked; each is valid until the next one is asked for."""


def read_parts(
    manifest: Manifest, reads: Sequence[PlannedRead], blocks: BlockReader
) -> Iterator[tuple[Box, RawArray]]:
    """Yields the parts that ``reads`` ask for of the image that ``manifest`` describes, in pieces of at most about two blocks."""
    starts = {entry.box: entry.start for entry in manifest.entries}
    limit = 2 * manifest.block_bytes
    todo = [
        (ImageEntry(read.source.box, starts[read.source.box]), span)
        for read in reads
        for span in spans(read.source.box, read.part, limit)
    ]
    numbers = [number for entry, span in todo for number in _blocks_of(manifest, entry, span)]
    distinct = [number for number, _ in groupby(numbers)]
    window = _Window(blocks(distinct), distinct, manifest.block_bytes, limit)
    for entry, span in todo:
        yield (
            span.part,
            view_of(entry.box, span, window.take(entry.start + span.start, entry.start + span.stop)),
        )


def _blocks_of(manifest: Manifest, entry: ImageEntry, span: ByteSpan) -> range:
    block_bytes = manifest.block_bytes
    return range((entry.start + span.start) // block_bytes, (entry.start + span.stop - 1) // block_bytes + 1)


class _Window:
    """A sliding window over an image's blocks, from which byte ranges are assembled."""

    def __init__(
        self, blocks: Iterator[ByteArray], numbers: Sequence[int], block_bytes: int, limit: int
    ) -> None:
        self._blocks = blocks
        self._numbers = iter(numbers)
        self._block_bytes = block_bytes
        self._assembled = np.empty(limit, dtype=np.uint8)
        self._number = -1
        self._block: ByteArray | None = None

    def take(self, start: int, stop: int) -> ByteArray:
        """The image's bytes ``start:stop``, valid until the next call."""
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        if first == last:
            return self._at(first)[start - first * self._block_bytes : stop - first * self._block_bytes]
        out = self._assembled[: stop - start]
        for number in range(first, last + 1):
            base = number * self._block_bytes
            low, high = max(start, base), min(stop, base + self._block_bytes)
            out[low - start : high - start] = self._at(number)[low - base : high - base]
        return out

    def _at(self, number: int) -> ByteArray:
        if self._block is None or number != self._number:
            self._number, self._block = next(self._numbers), next(self._blocks)
        return self._block

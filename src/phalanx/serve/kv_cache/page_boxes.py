"""Pages divided into boxes of layers and heads, one for each process of a divided model.

A page is sent in one order: for each stored part of keys and values the layers, in these the heads, of 64 tokens each. A process that has some
of the layers, or some heads of each, has a box of the page. So a page of two processes can be read by one, by three, or by two that divide it otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.serve.kv_cache.format import KVFormat
from phalanx.serve.kv_cache.memory import PageBytes
from phalanx.traffic.block_table import PAGE


@dataclass(frozen=True)
class PageBox:
    """Layers and heads of a page that a process has."""

    layers: range
    heads: range


@dataclass(frozen=True)
class PageShape:
    """The byte layout of a full page."""

    layers: int
    heads: int
    cells: tuple[int, ...]
    """Bytes of a head's 64 tokens in a layer, for each stored part."""

    @classmethod
    def around(cls, boxes: Collection[PageBox], kept: KVFormat) -> PageShape:
        """Return the layout of pages in a format, given the boxes of all processes."""
        stores = (store for part in kept.stores() for store in part)
        return cls(
            max(box.layers.stop for box in boxes),
            max(box.heads.stop for box in boxes),
            tuple(PAGE * width * dtype.itemsize for width, dtype in stores),
        )

    @property
    def full_box(self) -> PageBox:
        """The box of all layers and heads."""
        return PageBox(range(self.layers), range(self.heads))

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.heads * sum(self.cells)

    def cut(self, page: PageBytes, box: PageBox) -> PageBytes:
        """Return the bytes of a box of a page, in the order of a ``PageMemory`` of its layers and heads."""
        if box == self.full_box:
            return page
        return b"".join(view[_slices(box)].tobytes() for view in self._views(page))

    def assemble(self, parts: Iterable[tuple[PageBox, PageBytes]]) -> bytearray:
        """Assemble a page from its boxes."""
        page = bytearray(self.nbytes)
        for box, part in parts:
            own = PageShape(len(box.layers), len(box.heads), self.cells)
            for view, piece in zip(self._views(page), own._views(part), strict=True):
                view[_slices(box)] = piece
        return page

    def _views(self, page: PageBytes) -> Iterator[npt.NDArray[np.uint8]]:
        """``(layers, heads, bytes)`` of each tensor."""
        flat, begin = np.frombuffer(page, np.uint8), 0
        for cell in self.cells:
            end = begin + self.layers * self.heads * cell
            yield flat[begin:end].reshape(self.layers, self.heads, cell)
            begin = end


def _slices(box: PageBox) -> tuple[slice, slice]:
    return slice(box.layers.start, box.layers.stop), slice(box.heads.start, box.heads.stop)

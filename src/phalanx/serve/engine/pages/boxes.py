"""A page as boxes of layers and heads: what each of several processes has of it, and the whole, which looks the same whoever computed it.

A page travels whole, in one order: for each tensor that is stored of keys and values, layers, and in these heads, of 64 tokens each. A process that has some
of the layers, or some heads of each, has a box of it; so a page of two processes is read by one, by three, or by two that divide it otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.serve.engine.pages.kept import KeptFormat
from phalanx.serve.engine.pages.memory import PageBytes
from phalanx.traffic.pages import PAGE


@dataclass(frozen=True)
class PageBox:
    """Layers and heads of a page that a process has."""

    layers: range
    heads: range


@dataclass(frozen=True)
class PageShape:
    """How the bytes of a whole page lie."""

    layers: int
    heads: int
    cells: tuple[int, ...]
    """Bytes of a head's 64 tokens in a layer, of each tensor that is stored."""

    @classmethod
    def around(cls, boxes: Collection[PageBox], kept: KeptFormat) -> PageShape:
        """That of pages in a format, of which all processes together have these boxes."""
        stores = (store for part in kept.stores() for store in part)
        return cls(
            max(box.layers.stop for box in boxes),
            max(box.heads.stop for box in boxes),
            tuple(PAGE * width * dtype.itemsize for width, dtype in stores),
        )

    @property
    def whole(self) -> PageBox:
        """All of it."""
        return PageBox(range(self.layers), range(self.heads))

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.heads * sum(self.cells)

    def cut(self, page: PageBytes, box: PageBox) -> PageBytes:
        """The bytes of a box of a page, as ``PageMemory`` of its layers and heads has them."""
        if box == self.whole:
            return page
        return b"".join(view[_slices(box)].tobytes() for view in self._views(page))

    def assemble(self, parts: Iterable[tuple[PageBox, PageBytes]]) -> bytearray:
        """The page of which these are boxes."""
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

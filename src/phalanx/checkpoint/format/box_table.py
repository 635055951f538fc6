"""Boxes of many ranks as columns of integers, so that hundreds of thousands of them are merged, searched and stored at once.

A fleet's boxes are regular: rank after rank holds the next rows of the same tensors. Sorted by tensor, and as differences of
differences, their columns are almost all zeros, so that the boxes of 256 ranks are stored in some kilobytes. Merging neighbors
leaves of each tensor the few rectangles that a set of ranks covers together, most often one: whether a checkpoint is whole, and
which ranks hold what a reader needs, is then decided over sets of ranks instead of ranks. NumPy only, no torch, no files.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.image import ImageEntry
from phalanx.checkpoint.format.restore_plan import DISK, BoxLocation, Held, require_complete

Column = npt.NDArray[np.int64]
_SIZES = struct.Struct("<4Q")
_ZLIB_LEVEL = 1


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Boxes by column, sorted by tensor, holder and start. Row *i* is a box of ``tensors[tensor[i]]``.

    ``begin`` and ``end`` are of shape (rows, dimensions): the box's first element, and the one after its last. Tensors with fewer
    dimensions than the others have leading ones of extent 1, which are not stored in ``tensors``.
    """

    tensors: tuple[Box, ...]
    """The tensors, whole, sorted."""
    tensor: Column
    holder: Column
    """A number that says who holds the box, such as a rank."""
    start: Column
    """The byte of the holder's image at which the box begins."""
    begin: Column
    end: Column

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> Box:
        """The box in a row."""
        tensor = self.tensors[int(self.tensor[row])]
        dims = len(tensor.global_shape)
        offset = self.begin[row, self.begin.shape[1] - dims :].tolist()
        stop = self.end[row, self.end.shape[1] - dims :].tolist()
        return tensor.part(tuple(offset), tuple(b - a for a, b in zip(offset, stop, strict=True)))

    def in_image_order(self, rows: Column) -> Column:
        """``rows`` sorted by holder, then by where the boxes lie in its image."""
        return rows[np.lexsort((self.tensor[rows], self.start[rows], self.holder[rows]))]

    def rows_of(self, holder: int) -> Column:
        """The rows of one holder, in the order of its image."""
        return self.in_image_order(np.flatnonzero(self.holder == holder))

    def overlapping(self, needed: Iterable[Box]) -> Column:
        """The rows whose boxes have elements in common with one of ``needed``.

        Of a tensor that is needed with another shape or dtype, all rows: the plan that is made of them names the mismatch.
        """
        bounds = np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))
        by_name: dict[str, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            by_name.setdefault(tensor.name, []).append(number)
        found = np.zeros(len(self), dtype=bool)
        for box in needed:
            for number in by_name.get(box.name, ()):
                rows = slice(bounds[number], bounds[number + 1])
                tensor = self.tensors[number]
                if (tensor.dtype, tensor.global_shape) != (box.dtype, box.global_shape):
                    found[rows] = True
                elif box.numel:
                    first, last = self.begin.shape[1] - len(box.shape), np.array(box.offset) + box.shape
                    below = (self.begin[rows, first:] < last).all(1)
                    above = (self.end[rows, first:] > np.array(box.offset)).all(1)
                    # An empty box at an inner place passes both tests.
                    found[rows] |= below & above & (self.end[rows] > self.begin[rows]).all(1)
        return np.flatnonzero(found)

    def merged(self, holder: int) -> BoxTable:
        """The same elements in fewer boxes, all held by ``holder``: boxes side by side or over each other become one.

        Boxes are united along one dimension where they agree in all others, over and over until nothing changes: the union is exact.
        """
        full = (self.end > self.begin).all(1)
        tensor, begin, end = self.tensor[full], self.begin[full], self.end[full]
        before = -1
        while before != len(tensor):
            before = len(tensor)
            for dim in range(begin.shape[1]):
                tensor, begin, end = _merged_along(dim, tensor, begin, end)
        nothing = np.zeros(len(tensor), dtype=np.int64)
        return BoxTable(self.tensors, tensor, nothing + holder, nothing, begin, end)

    def require_whole(self, required: Sequence[Box] = ()) -> None:
        """Raises NotCoveredError unless the boxes cover ``required`` and every tensor of the table; a merged table is quick.

        MismatchError where a tensor is held in two shapes or dtypes.
        """
        names = [tensor.name for tensor in self.tensors]
        single = [names.count(name) == 1 for name in names] if len(set(names)) < len(names) else None
        counts = np.bincount(self.tensor, minlength=len(self.tensors))
        volume = np.bincount(self.tensor, (self.end - self.begin).prod(1), minlength=len(self.tensors))
        doubtful = [
            number
            for number, tensor in enumerate(self.tensors)
            if (tensor.numel and not (counts[number] == 1 and volume[number] == tensor.numel))
            or (single and not single[number])
        ]
        absent = [box for box in required if box.name not in set(names)] if required else []
        if not doubtful and not absent:
            return
        place = BoxLocation("", "", DISK)
        held = [Held(self.box(row), place) for row in np.flatnonzero(np.isin(self.tensor, doubtful)).tolist()]
        if single:
            held += [Held(tensor, place) for tensor, one in zip(self.tensors, single, strict=True) if not one]
        wanted = [self.tensors[number] for number in doubtful]
        require_complete(held, [*wanted, *absent])


def _merged_along(dim: int, tensor: Column, begin: Column, end: Column) -> tuple[Column, Column, Column]:
    """Unites rows that agree in all dimensions but ``dim`` and touch or overlap in it."""
    if not len(tensor):
        return tensor, begin, end
    others = [other for other in range(begin.shape[1]) if other != dim]
    line_keys = [tensor, *(column[:, other] for other in others for column in (begin, end))]
    order = np.lexsort((begin[:, dim], *reversed(line_keys)))
    first, last = begin[order, dim], end[order, dim]
    new_line = np.zeros(len(order), dtype=bool)
    for key in line_keys:
        in_order = key[order]
        new_line[1:] |= in_order[1:] != in_order[:-1]
    # How far the rows of a line reach so far: lines are put one behind the other, so that one running maximum serves all.
    shift = np.cumsum(new_line) * (int(last.max()) + 1)
    reach = np.maximum.accumulate(last + shift)
    new_line[1:] |= first[1:] + shift[1:] > reach[:-1]
    new_line[0] = True
    heads = np.flatnonzero(new_line)
    kept = order[heads]
    end = end[kept]
    end[:, dim] = np.maximum.reduceat(last, heads)
    return tensor[kept], begin[kept], end


def table_of(entries: Sequence[ImageEntry], holder: int) -> BoxTable:
    """The boxes of one image."""
    wholes = [whole(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in entries]
    tensors = tuple(sorted(set(wholes)))
    number = {tensor: index for index, tensor in enumerate(tensors)}
    dims = max((len(tensor.global_shape) for tensor in tensors), default=0)
    begin, end = np.zeros((len(entries), dims), np.int64), np.ones((len(entries), dims), np.int64)
    for row, entry in enumerate(entries):
        if entry.box.shape:
            begin[row, -len(entry.box.shape) :] = entry.box.offset
            end[row, -len(entry.box.shape) :] = np.add(entry.box.offset, entry.box.shape)
    start = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
    tensor = np.fromiter((number[one] for one in wholes), np.int64, len(entries))
    return _sorted(BoxTable(tensors, tensor, np.full(len(entries), holder, np.int64), start, begin, end))


def joined(tables: Sequence[BoxTable]) -> BoxTable:
    """All rows of several tables in one."""
    dims = max((table.begin.shape[1] for table in tables), default=0)
    tensors = tables[0].tensors if tables else ()
    if any(table.tensors != tensors for table in tables):
        tensors = tuple(sorted({tensor for table in tables for tensor in table.tensors}))
        number = {tensor: index for index, tensor in enumerate(tensors)}
        tables = [
            replace(table, tensor=np.array([number[one] for one in table.tensors], np.int64)[table.tensor])
            for table in tables
        ]
    tensor, holder, start = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)])
        for name in ("tensor", "holder", "start")
    )
    begin = _stacked([table.begin for table in tables], dims, 0)
    end = _stacked([table.end for table in tables], dims, 1)
    return _sorted(BoxTable(tensors, tensor, holder, start, begin, end))


def _stacked(columns: Sequence[Column], dims: int, filler: int) -> Column:
    wide = [
        np.pad(column, ((0, 0), (dims - column.shape[1], 0)), constant_values=filler) for column in columns
    ]
    return np.concatenate([np.zeros((0, dims), np.int64), *wide])


def _sorted(table: BoxTable) -> BoxTable:
    order = np.lexsort((table.start, table.holder, table.tensor))
    return BoxTable(
        table.tensors,
        *(getattr(table, name)[order] for name in ("tensor", "holder", "start", "begin", "end")),
    )


def encode_table(table: BoxTable) -> bytes:
    """The table as bytes: sizes, the tensors as compressed JSON, and the columns as compressed second differences."""
    names = [[one.name, one.dtype, list(one.global_shape)] for one in table.tensors]
    tensors = zlib.compress(json.dumps(names, separators=(",", ":")).encode(), _ZLIB_LEVEL)
    columns = np.vstack([table.tensor, table.holder, table.start, table.begin.T, table.end.T])
    twice = np.diff(columns, n=2, axis=1, prepend=np.zeros((len(columns), 2), np.int64))
    packed = zlib.compress(twice.astype("<i8").tobytes(), _ZLIB_LEVEL)
    return _SIZES.pack(len(table), table.begin.shape[1], len(tensors), len(packed)) + tensors + packed


def decode_table(data: bytes) -> BoxTable:
    """The inverse of ``encode_table``. Raises ValueError where the bytes are no table."""
    try:
        rows, dims, tensor_bytes, packed_bytes = _SIZES.unpack_from(data)
        middle = _SIZES.size + tensor_bytes
        tensors = _decoded_tensors(data[_SIZES.size : middle])
        unpacked = zlib.decompress(data[middle : middle + packed_bytes])
    except (struct.error, zlib.error, TypeError) as error:
        raise ValueError(f"not a table of boxes: {error}") from error
    columns = np.frombuffer(unpacked, "<i8").reshape(3 + 2 * dims, rows).astype(np.int64)
    columns = np.cumsum(np.cumsum(columns, axis=1), axis=1)
    tensor, holder, start = columns[:3]
    begin, end = columns[3 : 3 + dims].T, columns[3 + dims :].T
    return BoxTable(tensors, tensor, holder, start, np.ascontiguousarray(begin), np.ascontiguousarray(end))


@lru_cache(maxsize=64)
def _decoded_tensors(packed: bytes) -> tuple[Box, ...]:
    """Ranks that hold parts of the same tensors store the same bytes here: they are decoded once."""
    return tuple(
        whole(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(zlib.decompress(packed))
    )

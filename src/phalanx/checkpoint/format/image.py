"""The image: one rank's share of a checkpoint as one byte string that is also a valid safetensors file.

The same bytes are staged in memory, written to disk and sent to a peer. The format is safetensors
(https://github.com/huggingface/safetensors: 8 bytes header length, a JSON header, the tensors without gaps), so any tool opens a rank's
file. The header is padded so that the data is page-aligned, and tensors are sorted by decreasing item size, so that each is aligned. A
part of a tensor is stored under its name and index: ``model/embedding.weight[128:256,0:64]``.

The boxes of many ranks' images are kept as columns of integers (``BoxTable``). No torch, no files.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from phalanx.checkpoint.format.boxes import (
    DISK,
    SAFETENSORS_NAME,
    Box,
    BoxLocation,
    StoredBox,
    full_box,
    require_complete,
)

PAGE_BYTES = 4096
ByteArray = npt.NDArray[np.uint8]
RawArray = npt.NDArray[np.unsignedinteger]
RAW_DTYPE: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """A box and its byte offset in the image; its bytes are C-order, little-endian."""

    box: Box
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.box.nbytes


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Position of each box in an image of ``nbytes`` bytes that begins with ``header``."""

    header: bytes
    entries: tuple[ImageEntry, ...]
    nbytes: int

    def names_in(self, start: int, stop: int) -> list[str]:
        """Return the boxes with bytes in ``start:stop``, as text for an error message."""
        return [str(entry.box) for entry in self.entries if entry.start < stop and start < entry.stop]


@dataclass(frozen=True, slots=True)
class Image:
    """A layout filled with bytes. ``data`` (uint8) has at least ``layout.nbytes`` elements, header included."""

    layout: ImageLayout
    data: ByteArray


def image_layout(boxes: Sequence[Box]) -> ImageLayout:
    """Return the image layout of ``boxes``: a safetensors header padded to a page, then the boxes, those with large
    items first.

    Raises ValueError if two boxes are equal or a name cannot be stored.
    """
    ordered = sorted(boxes, key=lambda box: (-box.itemsize, box))
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for box in ordered:
        key = str(box)
        if key in fields:
            raise ValueError(f"{key} is given twice (or is a name that the file format reserves)")
        fields[key] = {
            "dtype": SAFETENSORS_NAME[box.dtype],
            "shape": list(box.shape),
            "data_offsets": [offset, offset + box.nbytes],
        }
        offset += box.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    data_start = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
    starts = accumulate((box.nbytes for box in ordered), initial=data_start)
    return ImageLayout(header, tuple(map(ImageEntry, ordered, starts)), data_start + offset)


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """``part`` of a stored box, and its range in the stored box's bytes."""

    part: Box
    start: int
    stop: int


def spans(source: Box, part: Box, limit_bytes: int) -> list[ByteSpan]:
    """Cut ``part`` of the stored box ``source`` into pieces that each span at most ``limit_bytes`` stored bytes, or one
    element.

    Byte positions are relative to the stored box. Empty for an empty part.
    """
    if not part.numel:
        return []
    strides = c_strides(source)
    first = sum(stride * (a - b) for stride, a, b in zip(strides, part.offset, source.offset, strict=True))
    length = (
        sum(stride * (size - 1) for stride, size in zip(strides, part.shape, strict=True)) + part.itemsize
    )
    if length <= limit_bytes or part.numel == 1:
        return [ByteSpan(part, first, first + length)]
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    rows = max(1, limit_bytes // strides[dim])
    pieces: list[ByteSpan] = []
    for row in range(0, part.shape[dim], rows):
        offset, shape = list(part.offset), list(part.shape)
        offset[dim] += row
        shape[dim] = min(rows, part.shape[dim] - row)
        pieces += spans(source, part.part(tuple(offset), tuple(shape)), limit_bytes)
    return pieces


def c_strides(box: Box) -> tuple[int, ...]:
    """Return the strides in bytes of a C-order array of ``box``."""
    strides: list[int] = []
    step = box.itemsize
    for size in reversed(box.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def view_of(source: Box, span: ByteSpan, data: ByteArray) -> RawArray:
    """Return the elements of ``span.part`` as a (strided) view of ``data``, the bytes ``span.start:span.stop`` of the stored box.

    The elements are unsigned integers of the item's size: raw bits for any dtype.
    """
    return np.ndarray(span.part.shape, RAW_DTYPE[source.itemsize], data, strides=c_strides(source))


# Boxes of many ranks as columns of integers, so that hundreds of thousands are merged, searched and stored at once.
#
# A fleet's boxes are regular: rank after rank has the next rows of the same tensors. Sorted by tensor, the second differences of their
# columns are almost all zeros, so the boxes of 256 ranks need some kilobytes. Merging neighbors leaves, for each tensor, the few
# rectangles that a set of ranks covers together, usually one. So completeness of a checkpoint, and the ranks that have a reader's boxes,
# are computed over sets of ranks.

Column = npt.NDArray[np.int64]
_SIZES = struct.Struct("<4Q")
_ZLIB_LEVEL = 1


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Boxes by column, sorted by tensor, holder and start. Row *i* is a box of ``tensors[tensor[i]]``.

    ``begin`` and ``end`` are ``(rows, dimensions)``: the box's first element, and the one after its last. Tensors with fewer dimensions
    than others have leading ones of extent 1, which are not stored in ``tensors``.
    """

    tensors: tuple[Box, ...]
    """The full tensors, sorted."""
    tensor: Column
    holder: Column
    """Number of the box's holder, such as a rank."""
    start: Column
    """Byte offset of the box in the holder's image."""
    begin: Column
    end: Column

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> Box:
        """Return the box of a row. Its offset and shape are in the last columns, as many as the tensor has dimensions."""
        tensor = self.tensors[int(self.tensor[row])]
        dims = len(tensor.global_shape)
        offset = self.begin[row, self.begin.shape[1] - dims :].tolist()
        stop = self.end[row, self.end.shape[1] - dims :].tolist()
        return tensor.part(tuple(offset), tuple(b - a for a, b in zip(offset, stop, strict=True)))

    def in_image_order(self, rows: Column) -> Column:
        """Return ``rows`` sorted by holder, then by position in its image."""
        return rows[np.lexsort((self.tensor[rows], self.start[rows], self.holder[rows]))]

    def rows_of(self, holder: int) -> Column:
        """Return the rows of one holder, in the order of its image."""
        return self.in_image_order(np.flatnonzero(self.holder == holder))

    def overlapping(self, needed: Iterable[Box]) -> Column:
        """Return the rows whose boxes overlap one of ``needed``.

        For a tensor that is needed with another shape or dtype, return all rows: the restore plan then reports the mismatch.
        """
        bounds = np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))
        by_name: dict[str, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            by_name.setdefault(tensor.name, []).append(number)
        is_match = np.zeros(len(self), dtype=bool)
        for box in needed:
            for number in by_name.get(box.name, ()):
                rows = slice(bounds[number], bounds[number + 1])
                tensor = self.tensors[number]
                if (tensor.dtype, tensor.global_shape) != (box.dtype, box.global_shape):
                    is_match[rows] = True
                elif box.numel:
                    first, last = self.begin.shape[1] - len(box.shape), np.array(box.offset) + box.shape
                    below = (self.begin[rows, first:] < last).all(1)
                    above = (self.end[rows, first:] > np.array(box.offset)).all(1)
                    # An empty box inside another passes both tests, so require a positive extent.
                    is_match[rows] |= below & above & (self.end[rows] > self.begin[rows]).all(1)
        return np.flatnonzero(is_match)

    def merged(self, holder: int) -> BoxTable:
        """Return the same elements in fewer boxes, all with ``holder``: adjacent and overlapping boxes are united.

        The result shows coverage only: its ``start`` column is zero, so nothing can be read by it. Empty boxes are left out.
        Boxes are united along one dimension if they agree in all others, repeatedly until nothing changes: the union is exact.
        """
        full = (self.end > self.begin).all(1)
        tensor, begin, end = self.tensor[full], self.begin[full], self.end[full]
        before = -1
        while before != len(tensor):
            before = len(tensor)
            for dim in range(begin.shape[1]):
                tensor, begin, end = _merged_along(dim, tensor, begin, end)
        zeros = np.zeros(len(tensor), dtype=np.int64)
        return BoxTable(self.tensors, tensor, zeros + holder, zeros, begin, end)

    def require_whole(self, required: Sequence[Box] = ()) -> None:
        """Raise NotCoveredError unless the boxes cover ``required`` and every tensor of the table. Fast for a merged table.

        Raise MismatchError if a tensor is stored with two shapes or dtypes.
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
        stored = [
            StoredBox(self.box(row), place) for row in np.flatnonzero(np.isin(self.tensor, doubtful)).tolist()
        ]
        if single:
            stored += [
                StoredBox(tensor, place)
                for tensor, is_single in zip(self.tensors, single, strict=True)
                if not is_single
            ]
        uncertain_tensors = [self.tensors[number] for number in doubtful]
        require_complete(stored, [*uncertain_tensors, *absent])


def _merged_along(dim: int, tensor: Column, begin: Column, end: Column) -> tuple[Column, Column, Column]:
    """Return the rows, sorted by lines, after uniting those that agree in all dimensions except ``dim`` and touch or overlap in it."""
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
    # Running end of the rows of a line. Lines are shifted one after the other, so that one running maximum covers all.
    shift = np.cumsum(new_line) * (int(last.max()) + 1)
    reach = np.maximum.accumulate(last + shift)
    new_line[1:] |= first[1:] + shift[1:] > reach[:-1]
    new_line[0] = True
    heads = np.flatnonzero(new_line)
    first_rows = order[heads]
    end = end[first_rows]
    end[:, dim] = np.maximum.reduceat(last, heads)
    return tensor[first_rows], begin[first_rows], end


def table_of(entries: Sequence[ImageEntry], holder: int) -> BoxTable:
    """Return the boxes of one image as a sorted table, all with ``holder``. Tensors with fewer dimensions are padded
    in front with extents of one.
    """
    full_boxes = [full_box(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in entries]
    tensors = tuple(sorted(set(full_boxes)))
    number = {tensor: index for index, tensor in enumerate(tensors)}
    dims = max((len(tensor.global_shape) for tensor in tensors), default=0)
    begin, end = np.zeros((len(entries), dims), np.int64), np.ones((len(entries), dims), np.int64)
    for row, entry in enumerate(entries):
        if entry.box.shape:
            begin[row, -len(entry.box.shape) :] = entry.box.offset
            end[row, -len(entry.box.shape) :] = np.add(entry.box.offset, entry.box.shape)
    start = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
    tensor = np.fromiter((number[tensor_box] for tensor_box in full_boxes), np.int64, len(entries))
    return _sorted(BoxTable(tensors, tensor, np.full(len(entries), holder, np.int64), start, begin, end))


def joined(tables: Sequence[BoxTable]) -> BoxTable:
    """Return all rows of several tables in one, sorted; tensors are numbered again if the tables have different ones."""
    dims = max((table.begin.shape[1] for table in tables), default=0)
    tensors = tables[0].tensors if tables else ()
    if any(table.tensors != tensors for table in tables):
        tensors = tuple(sorted({tensor for table in tables for tensor in table.tensors}))
        number = {tensor: index for index, tensor in enumerate(tensors)}
        tables = [
            replace(
                table,
                tensor=np.array([number[tensor_box] for tensor_box in table.tensors], np.int64)[table.tensor],
            )
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
    """Concatenate columns, padded in front with ``filler`` to ``dims`` dimensions."""
    wide = [
        np.pad(column, ((0, 0), (dims - column.shape[1], 0)), constant_values=filler) for column in columns
    ]
    return np.concatenate([np.zeros((0, dims), np.int64), *wide])


def _sorted(table: BoxTable) -> BoxTable:
    """Return the table in the order of tensor, holder and start."""
    order = np.lexsort((table.start, table.holder, table.tensor))
    return BoxTable(
        table.tensors,
        *(getattr(table, name)[order] for name in ("tensor", "holder", "start", "begin", "end")),
    )


def encode_table(table: BoxTable) -> bytes:
    """Encode the table: sizes, the tensors as compressed JSON, and the columns as compressed second differences."""
    names = [
        [tensor_box.name, tensor_box.dtype, list(tensor_box.global_shape)] for tensor_box in table.tensors
    ]
    tensors = zlib.compress(json.dumps(names, separators=(",", ":")).encode(), _ZLIB_LEVEL)
    columns = np.vstack([table.tensor, table.holder, table.start, table.begin.T, table.end.T])
    second_differences = np.diff(columns, n=2, axis=1, prepend=np.zeros((len(columns), 2), np.int64))
    packed = zlib.compress(second_differences.astype("<i8").tobytes(), _ZLIB_LEVEL)
    return _SIZES.pack(len(table), table.begin.shape[1], len(tensors), len(packed)) + tensors + packed


def decode_table(data: bytes) -> BoxTable:
    """Inverse of ``encode_table``, in int64. Raises ValueError if the bytes are not a table."""
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
    """Decode the tensors of a table. Cached: ranks with parts of the same tensors store the same bytes."""
    return tuple(
        full_box(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(zlib.decompress(packed))
    )

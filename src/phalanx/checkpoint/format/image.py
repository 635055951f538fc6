"""The image: one rank's share of a checkpoint as one byte string that is also a valid safetensors file.

The same bytes are staged in memory, written to disk and sent to a peer. The format is safetensors
(https://github.com/huggingface/safetensors: 8 bytes header length, a JSON header, the tensors without gaps), so any tool opens a rank's
file. The header is padded so that the data is page-aligned, and tensors are sorted by decreasing item size, so that each is aligned. A
part of a tensor is stored under its name and index: ``model/embedding.weight[128:256,0:64]``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.checkpoint.format.boxes import Box

PAGE_BYTES = 4096
ByteArray = npt.NDArray[np.uint8]
RawArray = npt.NDArray[np.unsignedinteger]
RAW_DTYPE: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_SAFETENSORS_DTYPE = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}


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
            "dtype": _SAFETENSORS_DTYPE[box.dtype],
            "shape": list(box.shape),
            "data_offsets": [offset, offset + box.nbytes],
        }
        offset += box.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    data_start = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
    starts = _running_sum([box.nbytes for box in ordered], data_start)
    return ImageLayout(header, tuple(map(ImageEntry, ordered, starts)), data_start + offset)


def _running_sum(sizes: list[int], start: int) -> list[int]:
    """Return the sum before each size, from ``start``."""
    starts = []
    for size in sizes:
        starts.append(start)
        start += size
    return starts


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

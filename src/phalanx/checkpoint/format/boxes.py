"""Boxes: rectangular parts of named tensors, the unit in which checkpoints are described.

A rank of a sharded job has, of each tensor, a box: an offset into the full tensor and a shape. All code that moves or stores tensors
(files, a peer's memory, another layout after a restart) works with boxes, so resharding is just the intersection of boxes. This module
has only the geometry: no torch, no bytes.
"""

import math
from dataclasses import dataclass

from phalanx.parallel.mesh.local_slice import LocalSlice, intersection, slices_in

Extent = tuple[int, ...]

# Bytes per element, by the name that ``str(torch.dtype)`` gives without its "torch." prefix.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The part of tensor ``name`` that begins at ``offset`` and extends over ``shape``, in elements.

    A scalar has shape (), an empty box (a rank without rows) has a 0 in its shape. Raises ValueError if the box is outside
    ``global_shape`` or the dtype is unknown.
    """

    name: str
    dtype: str
    global_shape: Extent
    offset: Extent
    shape: Extent

    def __post_init__(self) -> None:
        """Raise ValueError for a dtype that cannot be stored, unequal numbers of dimensions, or a box outside its tensor."""
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r} cannot be stored; supported: {', '.join(ITEMSIZE)}"
            )
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ValueError(
                f"{self.name}: global shape {self.global_shape}, offset {self.offset} and shape {self.shape}"
                " must have the same number of dimensions"
            )
        for full_size, start, size in zip(self.global_shape, self.offset, self.shape, strict=True):
            if start < 0 or size < 0 or start + size > full_size:
                raise ValueError(f"{self}: is outside the tensor of shape {self.global_shape}")

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.subscript}]"

    @property
    def subscript(self) -> str:
        """The box as an index of the full tensor: ``128:256,0:64``."""
        ends = zip(self.offset, self.shape, strict=True)
        return ",".join(f"{start}:{start + size}" for start, size in ends)

    @property
    def local_slice(self) -> LocalSlice:
        """Position of the box, without the tensor's name and dtype."""
        return LocalSlice(self.offset, self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_whole(self) -> bool:
        """True if the box is the full tensor."""
        return self.shape == self.global_shape

    def part(self, offset: Extent, shape: Extent) -> "Box":
        """Return another box of the same tensor."""
        return Box(self.name, self.dtype, self.global_shape, offset, shape)

    def rows(self, start: int, stop: int) -> "Box":
        """Return rows ``start:stop`` of this box, counted from its first row."""
        return self.part((self.offset[0] + start, *self.offset[1:]), (stop - start, *self.shape[1:]))

    def intersection(self, other: "Box") -> "Box | None":
        """Return the elements in both boxes of one tensor, or None if there are none."""
        common = intersection(self.local_slice, other.local_slice)
        return None if common is None else self.part(*common)

    def contains(self, other: "Box") -> bool:
        """Return True if every element of ``other`` is in this box."""
        if self.name != other.name or other.numel == 0:
            return self.name == other.name
        return self.intersection(other) == other

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the index of this box in an array with the elements of ``outer``."""
        return slices_in(self.local_slice, outer.offset)

    def minus(self, other: "Box") -> "list[Box]":
        """Return the elements of this box that are not in ``other``, as disjoint boxes (at most two per dimension)."""
        cut = self.intersection(other)
        if cut is None:
            return [self] if self.numel else []
        remainder: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, size) in enumerate(zip(cut.offset, cut.shape, strict=True)):
            before, after = start - offset[dim], offset[dim] + shape[dim] - (start + size)
            for begin, length in ((offset[dim], before), (start + size, after)):
                if length:
                    piece_offset = (*offset[:dim], begin, *offset[dim + 1 :])
                    remainder.append(self.part(piece_offset, (*shape[:dim], length, *shape[dim + 1 :])))
            offset[dim], shape[dim] = start, size
        return remainder


def full_box(name: str, dtype: str, shape: Extent) -> Box:
    """Return the box that is the full tensor."""
    return Box(name, dtype, shape, (0,) * len(shape), shape)

"""Boxes, rectangular parts of named tensors in which checkpoints are described, and plans of which box is read from where.

A rank of a sharded job has, of each tensor, a box: an offset into the full tensor and a shape. All code that moves or stores tensors
(files, a peer's memory, another layout after a restart) works with boxes, so resharding is just the intersection of boxes. This module
has only the geometry and the plans (``plan_restore``, ``share_of``): no torch, no bytes.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.checkpoint.format.errors import MismatchError, NotCoveredError
from phalanx.parallel.divisions import LocalSlice, intersection, slices_in

Extent = tuple[int, ...]

# By the name that ``str(torch.dtype)`` gives without its "torch." prefix: the name in safetensors, and the bytes per element.
_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
SAFETENSORS_NAME: dict[str, str] = {name: theirs for name, (theirs, _) in _DTYPES.items()}
ITEMSIZE: dict[str, int] = {name: nbytes for name, (_, nbytes) in _DTYPES.items()}


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


# Restore and share plans: pure functions of boxes that assign the source of every byte.
#
# Every rank derives its needed boxes from the run file, and gets the stored boxes from each tier. The plan covers each needed element
# exactly once from the nearest holder. The holder's part is cut out, and the remainder (at most two boxes per dimension) is looked up
# further away. No rank plans for another, so only the list of holders grows with the world size. ``share_of`` is the counterpart for
# saving: equal ranks divide the boxes that all of them have.

OWN_MEMORY, NODE_AGENT, PEER, DISK, REMOTE = range(5)
"""Distances of tiers, nearest first: of several holders of an element, the nearest is read."""


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """Location of boxes: the name of a tier, a holder within it (a rank, an address), and its distance."""

    tier: str
    holder: str
    distance: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box, and its location."""

    box: Box
    location: BoxLocation


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """One read of a restore plan: ``part`` is read from ``source``, and is within ``source.box``."""

    source: StoredBox
    part: Box


@dataclass(slots=True)
class _Shelf:
    """Holders of one tensor at one distance, sorted by their first row so that overlaps are found by bisection."""

    entries: list[tuple[int, StoredBox]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    longest: int = 0

    def sort(self) -> None:
        """Sort the stored boxes by their first row, so that ``near`` can search them."""
        self.entries.sort(key=lambda entry: (entry[1].box.offset[:1], entry[0]))
        self.starts = [_rows_of(stored.box)[0] for _, stored in self.entries]
        self.longest = max(_rows_of(stored.box)[1] for _, stored in self.entries)

    def near(self, box: Box) -> list[tuple[int, StoredBox]]:
        """Return the stored boxes, with their numbers, that may overlap ``box`` in their rows; some of them may not."""
        start, size = _rows_of(box)
        return self.entries[
            bisect_left(self.starts, start - self.longest + 1) : bisect_left(self.starts, start + size)
        ]


def _rows_of(box: Box) -> tuple[int, int]:
    return (box.offset[0], box.shape[0]) if box.shape else (0, 1)


def plan_restore(
    needed: Sequence[Box], stored: Sequence[StoredBox], *, reader: int = 0
) -> tuple[PlannedRead, ...]:
    """Return the reads that cover each element of every needed box exactly once, nearest holders first.

    Reads are in the order in which ``stored`` lists their sources, so that a file is read front to back. If several equally near holders
    have the same elements, ``reader`` (for example the restoring rank) rotates the choice, which spreads the load.

    Raises MismatchError if a tensor is stored with another global shape or dtype, NotCoveredError if elements are stored nowhere. Both
    list every such tensor.
    """
    shelves = _shelves(needed, stored)
    reads: list[tuple[int, PlannedRead]] = []
    uncovered: list[Box] = []
    for box in needed:
        uncovered_parts = [box] if box.numel else []
        for shelf in shelves.get(box.name, ()):
            if not uncovered_parts:
                break
            candidates = shelf.near(box)
            turn = reader % len(candidates) if candidates else 0
            for index, source in candidates[turn:] + candidates[:turn]:
                uncovered_parts = _take(uncovered_parts, index, source, reads)
        uncovered += uncovered_parts
    if uncovered:
        raise NotCoveredError(_describe_uncovered(uncovered), sorted({box.name for box in uncovered}))
    # Parts are cut out of the remainder of a box, so they are disjoint: equal counts mean that each element is read once.
    assert sum(read.part.numel for _, read in reads) == sum(box.numel for box in needed)
    reads.sort(key=lambda entry: (entry[0], entry[1].part.offset))
    return tuple(read for _, read in reads)


def require_complete(stored: Sequence[StoredBox], required: Sequence[Box] = ()) -> None:
    """Raise NotCoveredError unless ``stored`` covers ``required`` and every tensor that it names.

    Raise MismatchError if holders disagree about a tensor's shape or dtype.
    """
    named = {
        entry.box.name: full_box(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in stored
    }
    plan_restore([*named.values(), *(box for box in required if box.name not in named)], stored)


def _take(
    uncovered: list[Box], index: int, source: StoredBox, reads: list[tuple[int, PlannedRead]]
) -> list[Box]:
    """Append to ``reads`` what ``source`` has of the uncovered boxes, and return the rest of them."""
    remaining: list[Box] = []
    for piece in uncovered:
        part = piece.intersection(source.box)
        if part is None:
            remaining.append(piece)
        else:
            reads.append((index, PlannedRead(source, part)))
            remaining += piece.minus(part)
    return remaining


def _shelves(needed: Sequence[Box], stored: Sequence[StoredBox]) -> dict[str, list[_Shelf]]:
    """Return by name the stored boxes of each needed tensor, grouped by distance, nearest first. Empty boxes are left
    out. Raises MismatchError for another global shape or dtype.
    """
    needed_by_name = {box.name: box for box in needed}
    by_distance: dict[str, dict[int, _Shelf]] = defaultdict(lambda: defaultdict(_Shelf))
    different: dict[str, Box] = {}
    for index, entry in enumerate(stored):
        needed_box = needed_by_name.get(entry.box.name)
        if needed_box is None:
            continue
        if (needed_box.global_shape, needed_box.dtype) != (entry.box.global_shape, entry.box.dtype):
            different.setdefault(needed_box.name, entry.box)
        elif entry.box.numel:
            by_distance[needed_box.name][entry.location.distance].entries.append((index, entry))
    if different:
        raise MismatchError(_describe_mismatch(needed_by_name, different), sorted(different))
    shelves = {name: [shelf for _, shelf in sorted(group.items())] for name, group in by_distance.items()}
    for group in shelves.values():
        for shelf in group:
            shelf.sort()
    return shelves


def _describe_mismatch(needed_by_name: dict[str, Box], different: dict[str, Box]) -> str:
    """Return the message that lists the tensors whose stored shape or dtype is ``different`` from the needed one, with the remedy."""
    lines = [
        f"  {name}: needed {needed_by_name[name].dtype} {needed_by_name[name].global_shape}, stored {box.dtype} {box.global_shape}"
        for name, box in sorted(different.items())
    ]
    return (
        _listed("the checkpoint has tensors of another shape or dtype than the model needs", lines)
        + "\nRestore with the run file the checkpoint was written with, or another checkpoint."
    )


def _describe_uncovered(uncovered: Iterable[Box]) -> str:
    lines = [f"  {box} ({box.numel} of its elements)" for box in sorted(uncovered)]
    return _listed("the checkpoint lacks needed elements; missing", lines) + (
        "\nRestore with the run file the checkpoint was written with, or list these tensors in may_be_missing."
    )


def _listed(head: str, lines: list[str], most: int = 20) -> str:
    """Return a message of a heading and at most ``most`` lines."""
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"{head}:", *lines[:most], *more])


def share_of(boxes: Sequence[Box], replica: int, replicas: int) -> list[Box]:
    """Return the parts of ``boxes`` that this replica writes; ``replicas`` equal ranks have all of them.

    The sorted boxes are concatenated and cut into ``replicas`` runs of equal bytes. Each cut is moved to the nearest
    row of its box. So at most ``replicas - 1`` boxes are divided, and a share differs from the equal one by at most a
    row. Deterministic; the shares are disjoint and together complete. Empty boxes belong to no share, except a tensor
    without elements, which is written by replica 0 to keep its name. Raises ValueError for a ``replica`` that does not
    exist.
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} is not one of {replicas}")
    total = sum(box.nbytes for box in boxes)
    low, high = total * replica // replicas, total * (replica + 1) // replicas
    share: list[Box] = []
    start = 0
    for box in sorted(boxes):
        if box.nbytes:
            rows = box.shape[0] if box.shape else 1
            first, last = (_nearest_row(cut - start, box.nbytes, rows) for cut in (low, high))
            assert 0 <= first <= last <= rows, "cuts lie in the box and in order"
            if (first, last) == (0, rows):
                share.append(box)
            elif last > first:
                share.append(box.rows(first, last))
            start += box.nbytes
        elif box.is_whole and replica == 0:
            share.append(box)
    return share


def _nearest_row(cut: int, nbytes: int, rows: int) -> int:
    """Return the row that begins nearest to the byte ``cut``."""
    row_bytes = nbytes // rows
    return min(max((cut + row_bytes // 2) // row_bytes, 0), rows)

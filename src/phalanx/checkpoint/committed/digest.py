"""Identity of a model's weights, one SHA-256 that does not depend on sharding or storage, and comparison of two checkpoints.

For each tensor, sorted by name, the line ``name dtype shape`` and the SHA-256 of its full data (little-endian, C order) are fed into
one SHA-256. With two levels, ranks hash tensors in parallel and exchange only 32 bytes for each. Two runs have the same model if and
only if these digests are equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.format.blocks import grouped
from phalanx.checkpoint.format.boxes import Box, Extent, StoredBox, full_box, plan_restore
from phalanx.checkpoint.format.errors import NotCoveredError
from phalanx.checkpoint.format.image import RAW_DTYPE, RawArray, spans
from phalanx.checkpoint.tiers.tier import ReadableTier, Tier

# Boxes of a committed step as NumPy arrays, for code that reads checkpoints without torch.


def gather(
    tier: ReadableTier, step: int, boxes: Sequence[Box], stored: Sequence[StoredBox]
) -> list[RawArray]:
    """Return the elements of each box as raw unsigned integers of the item's size, in C order.

    ``stored`` is ``tier.boxes(step)``, or a subset that covers all boxes. Raises the errors of ``plan_restore`` (NotCoveredError for
    another subset) and of ``ReadableTier.read``.
    """
    arrays = [np.empty(box.shape, RAW_DTYPE[box.itemsize]) for box in boxes]
    targets: dict[str, list[tuple[Box, RawArray]]] = {}
    for box, array in zip(boxes, arrays, strict=True):
        targets.setdefault(box.name, []).append((box, array))
    for piece, data in tier.read(step, plan_restore(boxes, stored)):
        for box, array in targets[piece.name]:
            common = piece.intersection(box)
            if common is not None:
                array[common.slices_in(box)] = data[common.slices_in(piece)]
    return arrays


WEIGHTS = "model/"
OPTIMIZER = "optimizer/"
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor's dtype (as "bfloat16"), full shape, and the 32-byte SHA-256 of its data."""

    dtype: str
    shape: Extent
    sha256: bytes


def tensor_digest(dtype: str, shape: Extent, data: Iterable[Any]) -> TensorDigest:
    """Return the SHA-256 digest of a tensor, given its full data, little-endian in C order, as successive bytes-like parts."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return TensorDigest(dtype, shape, digest.digest())


def combine(tensors: Mapping[str, TensorDigest]) -> str:
    """Return the digest of all tensors, as 64 hexadecimal digits. It covers names, dtypes, shapes and data, in the
    order of names.

    Each tensor adds a line "name dtype shape" and its 32-byte digest. A shape is written as ``2,3``, a scalar's as
    ``()``.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape = ",".join(map(str, tensor.shape)) or "()"
        digest.update(f"{name} {tensor.dtype} {shape}\n".encode())
        digest.update(tensor.sha256)
    return digest.hexdigest()


def digest_checkpoint(tier: ReadableTier, step: int, prefix: str = WEIGHTS) -> str:
    """Return the digest of the checkpoint's tensors whose names begin with ``prefix``, which is removed from the names.

    Streams with bounded memory. Raises NotCoveredError if the checkpoint has no such tensor, or not all of one.
    """
    stored = tier.boxes(step)
    full_boxes = {
        entry.box.name: full_box(entry.box.name, entry.box.dtype, entry.box.global_shape)
        for entry in stored
        if entry.box.name.startswith(prefix)
    }
    if not full_boxes:
        raise NotCoveredError(f"step {step} of {tier.name} holds no tensor named {prefix}...", [prefix])
    hashes = {name: hashlib.sha256() for name in full_boxes}
    for batch in batches([full_boxes[name] for name in sorted(full_boxes)]):
        for box, data in zip(batch, gather(tier, step, batch, stored), strict=True):
            hashes[box.name].update(data.reshape(-1).view(np.uint8).data)
    return combine(
        {
            name.removeprefix(prefix): TensorDigest(box.dtype, box.global_shape, hashes[name].digest())
            for name, box in full_boxes.items()
        }
    )


def batches(tensors: Sequence[Box]) -> Iterator[list[Box]]:
    """Return parts of the tensors, in C order, about ``_BATCH_BYTES`` at a time.

    Small tensors share a batch: they are contiguous in a file, whose blocks are then read once.
    """
    parts = (span.part for tensor in tensors for span in spans(tensor, tensor, _BATCH_BYTES))
    return grouped(parts, lambda part: part.nbytes, _BATCH_BYTES)


# Comparison of two checkpoints of one step, tensor by tensor and bit by bit, for any layouts.
#
# The same elements of both are read side by side, some megabytes at a time, with bounded memory and without torch.


class TensorDifference(msgspec.Struct, frozen=True):
    """A tensor that differs between two checkpoints."""

    name: str
    description: str = msgspec.field(name="what")
    """Text: how many elements differ and by how much, or which side lacks the tensor."""
    elements: int = 0
    """Number of elements whose bits differ."""
    first: Extent = ()
    """Index of the first of them."""
    largest: float = 0.0
    """Largest absolute difference of two elements; 0 if only bits without value differ, NaN if one is not a number."""


def compare_step(
    first: Tier, second: Tier, step: int, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> list[TensorDifference]:
    """Return the tensors that differ in committed ``step``: the model's in the order of its layers, then the
    optimizer's.

    A tensor of only one side, or with another dtype or shape, differs without a comparison of elements.
    ``on_progress(done_tensors, total_tensors)`` is called after each batch. Raises ``CheckpointError`` if a side
    cannot be read. Streams with bounded memory.
    """
    sides = (first, second)
    stored = [side.boxes(step) for side in sides]
    tables = [
        {entry.box.name: full_box(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in boxes}
        for boxes in stored
    ]
    names = sorted(tables[0].keys() | tables[1].keys(), key=_place)
    differences: dict[str, TensorDifference] = {}
    tallies: dict[str, _Tally] = {}
    for name in names:
        left, right = (table.get(name) for table in tables)
        if left is None or right is None:
            description = f"only the {'second' if left is None else 'first'} has it"
            differences[name] = TensorDifference(name, description)
        elif left != right:
            description = " is not ".join(f"{box.dtype} {list(box.global_shape)}" for box in (left, right))
            differences[name] = TensorDifference(name, description)
        else:
            tallies[name] = _Tally(left)
    compared: set[str] = set()
    for batch in batches([tally.tensor for tally in tallies.values()]):
        left_data, right_data = (
            gather(side, step, batch, own) for side, own in zip(sides, stored, strict=True)
        )
        for part, ours, theirs in zip(batch, left_data, right_data, strict=True):
            tallies[part.name].add(part, ours, theirs)
        compared |= {part.name for part in batch}
        on_progress(len(compared), len(tallies))
    differences |= {name: tally.difference() for name, tally in tallies.items() if tally.elements}
    return [differences[name] for name in names if name in differences]


def _place(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Return a sort key that orders weights before other state, and layer 2 before layer 10."""
    words = re.split(r"(\d+)", name)
    return not name.startswith(WEIGHTS), [
        (not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words
    ]


@dataclass
class _Tally:
    """Running comparison of one tensor."""

    tensor: Box
    elements: int = 0
    first: Extent = ()
    largest: float = 0.0

    def add(self, part: Box, left: RawArray, right: RawArray) -> None:
        """Count the elements that differ by bits in a part of the tensor; note the first one's index and the largest difference."""
        differs = np.argwhere(left != right)
        if not len(differs):
            return
        if not self.elements:
            self.first = tuple(int(a) + b for a, b in zip(differs[0], part.offset, strict=True))
        self.elements += len(differs)
        places = tuple(differs.T)
        values = [numbers(np.asarray(side[places]), self.tensor.dtype) for side in (left, right)]
        with np.errstate(invalid="ignore", over="ignore"):
            self.largest = float(np.maximum(self.largest, np.abs(values[0] - values[1]).max()))

    def difference(self) -> TensorDifference:
        """Return the result."""
        extent = f"{self.elements:,} of {self.tensor.numel:,} elements differ, by up to {self.largest:.3g}"
        description = f"{extent}; the first is {list(self.first)}" if self.first else extent
        return TensorDifference(self.tensor.name, description, self.elements, self.first, self.largest)


def numbers(bits: RawArray, dtype: str) -> NDArray[np.float64]:
    """Return the values of raw elements of ``dtype`` (as "bfloat16") in float64.

    For dtypes that NumPy lacks, the bits as integers. 8-bit floating-point, bool and complex64 are such dtypes.
    """
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype in ("bool", "complex64") or dtype.startswith("float8"):
        return bits.astype(np.float64)
    return bits.view(np.dtype(dtype)).astype(np.float64)

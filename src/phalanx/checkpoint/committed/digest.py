"""The identity of a model's weights, one SHA-256 that does not depend on sharding or storage, and the comparison of two checkpoints.

For each tensor, sorted by name, the line ``name dtype shape`` and the SHA-256 of its full data (little-endian, C
order) go into one SHA-256. Two levels, so that ranks hash tensors side by side and only 32 bytes of each travel. Two
runs have computed the same model exactly when these digests are equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.errors import NotCoveredError
from phalanx.checkpoint.format.image import RAW_DTYPE, RawArray, spans
from phalanx.checkpoint.format.restore_plan import Held, plan_restore
from phalanx.checkpoint.tiers.tier import ReadableTier, Tier

# Boxes of a committed step as NumPy arrays, for code that reads checkpoints without torch.


def gather(tier: ReadableTier, step: int, boxes: Sequence[Box], held: Sequence[Held]) -> list[RawArray]:
    """The elements of each box as raw unsigned integers of the item's size, in C order.

    ``held`` is ``tier.boxes(step)``, or what of it may be used. Raises what ``plan_restore`` and ``ReadableTier.read`` raise.
    """
    arrays = [np.empty(box.shape, RAW_DTYPE[box.itemsize]) for box in boxes]
    targets: dict[str, list[tuple[Box, RawArray]]] = {}
    for box, array in zip(boxes, arrays, strict=True):
        targets.setdefault(box.name, []).append((box, array))
    for piece, data in tier.read(step, plan_restore(boxes, held)):
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
    """The digest of a tensor whose full data, little-endian in C order, comes as bytes-like parts in turn."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return TensorDigest(dtype, shape, digest.digest())


def combine(tensors: Mapping[str, TensorDigest]) -> str:
    """The digest of all tensors together, as 64 hexadecimal digits. A shape is written as ``2,3``, a scalar's as ``()``."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape = ",".join(map(str, tensor.shape)) or "()"
        digest.update(f"{name} {tensor.dtype} {shape}\n".encode())
        digest.update(tensor.sha256)
    return digest.hexdigest()


def digest_checkpoint(tier: ReadableTier, step: int, prefix: str = WEIGHTS) -> str:
    """The digest of the checkpoint's tensors whose names begin with ``prefix``, which is left out of the names.

    Streams with bounded memory. Raises NotCoveredError where the checkpoint has no such tensor or not all of one.
    """
    held = tier.boxes(step)
    wholes = {
        held_box.box.name: whole(held_box.box.name, held_box.box.dtype, held_box.box.global_shape)
        for held_box in held
        if held_box.box.name.startswith(prefix)
    }
    if not wholes:
        raise NotCoveredError(f"step {step} of {tier.name} holds no tensor named {prefix}...", [prefix])
    hashes = {name: hashlib.sha256() for name in wholes}
    for batch in batches([wholes[name] for name in sorted(wholes)]):
        for box, data in zip(batch, gather(tier, step, batch, held), strict=True):
            hashes[box.name].update(data.reshape(-1).view(np.uint8).data)
    return combine(
        {
            name.removeprefix(prefix): TensorDigest(box.dtype, box.global_shape, hashes[name].digest())
            for name, box in wholes.items()
        }
    )


def batches(tensors: Sequence[Box]) -> Iterator[list[Box]]:
    """Parts of the tensors, in C order and at most about ``_BATCH_BYTES`` at a time.

    Small tensors share a batch: they lie side by side in a file, whose blocks are then read once.
    """
    batch: list[Box] = []
    size = 0
    for tensor in tensors:
        for span in spans(tensor, tensor, _BATCH_BYTES):
            if batch and size + span.part.nbytes > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(span.part)
            size += span.part.nbytes
    if batch:
        yield batch


# Comparison of two checkpoints of one step, tensor by tensor and bit by bit, whatever layouts wrote them.
#
# The same elements of both are read side by side, some megabytes at a time, so that memory is bounded, and torch is not needed.


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    what: str
    """For people: how many elements differ and by how much, or that a side does not have it."""
    elements: int = 0
    """Number of elements whose bits differ."""
    first: Extent = ()
    """Index of the first of them."""
    largest: float = 0.0
    """Largest absolute difference of two elements; 0 where only bits without value differ, NaN where one is not a number."""


def compare_step(
    one: Tier, other: Tier, step: int, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> list[TensorDifference]:
    """The tensors that differ in committed ``step``: the model's in the order of its layers, then the optimizer's.

    ``on_progress(done_tensors, total_tensors)`` is called after each tensor. Raises ``CheckpointError`` if a side cannot be read.
    """
    sides = (one, other)
    held = [side.boxes(step) for side in sides]
    tables = [
        {entry.box.name: whole(entry.box.name, entry.box.dtype, entry.box.global_shape) for entry in boxes}
        for boxes in held
    ]
    names = sorted(tables[0].keys() | tables[1].keys(), key=_place)
    found: dict[str, TensorDifference] = {}
    tallies: dict[str, _Tally] = {}
    for name in names:
        left, right = (table.get(name) for table in tables)
        if left is None or right is None:
            what = f"only the {'second' if left is None else 'first'} has it"
            found[name] = TensorDifference(name, what)
        elif left != right:
            what = " is not ".join(f"{box.dtype} {list(box.global_shape)}" for box in (left, right))
            found[name] = TensorDifference(name, what)
        else:
            tallies[name] = _Tally(left)
    done: set[str] = set()
    for batch in batches([tally.tensor for tally in tallies.values()]):
        left_data, right_data = (
            gather(side, step, batch, its) for side, its in zip(sides, held, strict=True)
        )
        for part, ours, theirs in zip(batch, left_data, right_data, strict=True):
            tallies[part.name].add(part, ours, theirs)
        done |= {part.name for part in batch}
        on_progress(len(done), len(tallies))
    found |= {name: tally.difference() for name, tally in tallies.items() if tally.elements}
    return [found[name] for name in names if name in found]


def _place(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Sorts weights before other state, and layer 2 before layer 10."""
    words = re.split(r"(\d+)", name)
    return not name.startswith(WEIGHTS), [
        (not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words
    ]


@dataclass
class _Tally:
    """What is known of a tensor so far."""

    tensor: Box
    elements: int = 0
    first: Extent = ()
    largest: float = 0.0

    def add(self, part: Box, left: RawArray, right: RawArray) -> None:
        """Compares a part of the tensor: raw elements of the shape of ``part``."""
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
        """The finding."""
        how = f"{self.elements:,} of {self.tensor.numel:,} elements differ, by up to {self.largest:.3g}"
        what = f"{how}; the first is {list(self.first)}" if self.first else how
        return TensorDifference(self.tensor.name, what, self.elements, self.first, self.largest)


def numbers(bits: RawArray, dtype: str) -> NDArray[np.float64]:
    """The values of raw elements of ``dtype`` (as "bfloat16") in float64; of a format that NumPy lacks, the bits as integers."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype in ("bool", "complex64") or dtype.startswith("float8"):
        return bits.astype(np.float64)
    return bits.view(np.dtype(dtype)).astype(np.float64)

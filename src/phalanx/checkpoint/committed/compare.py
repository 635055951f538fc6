"""Comparison of two checkpoints of one step, tensor by tensor and bit by bit, whatever layouts wrote them.

The same elements of both are read side by side, some megabytes at a time, so that memory is bounded, and torch is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.committed.digest import WEIGHTS, batches
from phalanx.checkpoint.committed.gather import gather
from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.image import RawArray
from phalanx.checkpoint.tiers.tier import Tier


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

"""Boxes of a committed step as NumPy arrays, for code that reads checkpoints without torch."""

from collections.abc import Sequence

import numpy as np

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.image import RAW_DTYPE, RawArray
from phalanx.checkpoint.format.restore_plan import Held, plan_restore
from phalanx.checkpoint.tiers.tier import ReadableTier


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

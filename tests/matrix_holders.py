"""Holders of matrices from what each rank says it has, without a process group; and the same by asking every rank about every matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from phalanx.parallel.divisions import LocalSlice, intersection
from phalanx.train.optimizers.matrix_optimizer import Holders, Matrix


def holders_of(
    shapes: Mapping[str, tuple[int, ...]], boxes: Sequence[Mapping[str, LocalSlice]]
) -> dict[str, Holders]:
    """The holders of all parameters; ``boxes`` lists each rank's parts, those that are empty left out or not."""
    return {
        name: Holders(
            shape,
            np.array([one.get(name, ((0,) * len(shape), (0,) * len(shape))) for one in boxes], np.int64),
        )
        for name, shape in shapes.items()
    }


def shares_of(matrix: Matrix, boxes: Sequence[Mapping[str, LocalSlice]]) -> list[tuple[int, LocalSlice]]:
    """The ranks that have a part of ``matrix``, each with its part."""
    parts = [
        intersection(matrix.box, one[matrix.parameter]) if matrix.parameter in one else None for one in boxes
    ]
    return [(rank, part) for rank, part in enumerate(parts) if part is not None]

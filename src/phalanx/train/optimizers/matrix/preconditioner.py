"""Blocks of a matrix with row and column statistics, as Shampoo and SOAP use them.

The covariance of a matrix's rows is a matrix of as many rows, and its decomposition costs their cube. Matrices larger than
``block_size`` are therefore divided into blocks, as even as can be, each with statistics of its own. Statistics of all blocks
are kept in one tensor ``(block rows, block columns, n, n)``; where blocks differ by a row, the smaller ones fill it in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from phalanx.model.facts.optimizer_state import BlockGrid
from phalanx.parallel.mesh.partition import piece


@dataclass(frozen=True)
class MatrixBlock:
    """One block of a matrix."""

    place: tuple[int, int]
    rows: slice
    columns: slice

    def left(self, statistics: Tensor) -> Tensor:
        """This block's part of all blocks' row statistics ``(block rows, block columns, n, n)``: ``(rows, rows)``, a view."""
        height = self.rows.stop - self.rows.start
        return statistics[self.place][:height, :height]

    def right(self, statistics: Tensor) -> Tensor:
        """This block's part of all blocks' column statistics: ``(columns, columns)``, a view."""
        width = self.columns.stop - self.columns.start
        return statistics[self.place][:width, :width]

    def of(self, matrix: Tensor) -> Tensor:
        """This block of ``matrix``, in fresh memory: kernels may round as their operands are aligned."""
        return matrix[self.rows, self.columns].clone()


class MatrixBlocks(BlockGrid):
    """The blocks of a matrix of ``rows x columns``, row by row."""

    def __iter__(self) -> Iterator[MatrixBlock]:
        down, across = self.counts
        for i in range(down):
            for j in range(across):
                rows, columns = piece(self.rows, i, down), piece(self.columns, j, across)
                yield MatrixBlock((i, j), slice(rows.start, rows.stop), slice(columns.start, columns.stop))


def aligned(view: Tensor) -> Tensor:
    """``view`` in fresh memory of its own: kernels may round as their operands are aligned."""
    return view.contiguous() if not view.is_contiguous() else view.clone()

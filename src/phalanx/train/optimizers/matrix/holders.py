"""The holders of every matrix: which ranks hold which part of it, as arrays over ranks and not as objects for each.

A stage of a mixture has tens of thousands of matrices and can have thousands of ranks, so nothing here is made for each pair of
them. A parameter has one table with a row for every rank: where its part begins and where it ends. The ranks that hold something of
one matrix of a stack are found by sorting the pairs of rank and matrix that there are, not by asking every rank about every matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phalanx.model.facts.holdings import deal_matrices
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.parallel.mesh.torch_compat import all_gather_single, device_of_messages

Ranks = NDArray[np.int64]
_GATHERED_BYTES = 1 << 26
"""Bytes of tables that are gathered at once."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that is a matrix, or one matrix of a stack ``(matrices, rows, columns)``."""

    parameter: str
    rows: int
    columns: int
    index: int | None = None
    """Place in the stack."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def box(self) -> LocalSlice:
        """Where it lies in the parameter."""
        if self.index is None:
            return LocalSlice((0, 0), (self.rows, self.columns))
        return LocalSlice((self.index, 0, 0), (1, self.rows, self.columns))


def matrices_of(parameter: str, shape: tuple[int, ...]) -> list[Matrix]:
    """The matrices that a parameter of two or three dimensions consists of."""
    if len(shape) == 2:
        return [Matrix(parameter, *shape)]
    count, rows, columns = shape
    return [Matrix(parameter, rows, columns, index) for index in range(count)]


class Holders:
    """The holders of one parameter's matrices.

    Args:
        shape: Of the parameter.
        table: ``(ranks, 2, dims)``, int: the first element of each rank's part, and its extent in each dimension.
    """

    def __init__(self, shape: tuple[int, ...], table: NDArray[np.int64]) -> None:
        self._stacked = len(shape) == 3
        count = shape[0] if self._stacked else 1
        begin, extent = table[:, 0], table[:, 1]
        # ``(ranks, 4)``: first row and column of each rank's part of any matrix, and how many it has of both.
        self._parts = np.concatenate([begin[:, -2:], extent[:, -2:]], 1)
        first = begin[:, 0] if self._stacked else np.zeros(len(table), np.int64)
        length = np.where((extent > 0).all(1), extent[:, 0] if self._stacked else 1, 0)
        # One entry for each rank and matrix that it has a part of, sorted by matrix; the sort is stable, so ranks ascend.
        ranks = np.repeat(np.arange(len(table)), length)
        within = np.arange(len(ranks)) - np.repeat(np.cumsum(length) - length, length)
        matrices = np.repeat(first, length) + within
        order = np.argsort(matrices, kind="stable")
        self._ranks = ranks[order]
        self._bounds = np.searchsorted(matrices[order], np.arange(count + 1))
        self._whole = (self._parts == (0, 0, *shape[-2:])).all(1)

    def of(self, matrix: Matrix) -> Ranks:
        """The ranks that hold a part of ``matrix``, ascending."""
        at = matrix.index or 0
        return self._ranks[self._bounds[at] : self._bounds[at + 1]]

    def whole_on(self, matrix: Matrix) -> list[int]:
        """The ranks that hold all of ``matrix``, ascending."""
        ranks = self.of(matrix)
        found: list[int] = ranks[self._whole[ranks]].tolist()
        return found

    def part(self, matrix: Matrix, rank: int) -> LocalSlice:
        """The part of ``matrix``, in the parameter, that one of its holders has."""
        row, column, rows, columns = self._parts[rank].tolist()
        if matrix.index is None:
            return LocalSlice((row, column), (rows, columns))
        return LocalSlice((matrix.index, row, column), (1, rows, columns))

    def senders(self, matrix: Matrix, owner: int) -> Ranks:
        """For each part of ``matrix``, one of those who hold it: the owner if it does, else the first. Ascending."""
        ranks = self.of(matrix)
        _, first = np.unique(self._parts[ranks], axis=0, return_index=True)
        chosen = ranks[first]
        if owner in ranks:
            chosen = np.append(chosen[(self._parts[chosen] != self._parts[owner]).any(1)], owner)
        return np.sort(chosen)

    def sends(self, matrix: Matrix, rank: int, owner: int) -> bool:
        """True if ``rank``, a holder, is one of the senders."""
        ranks = self.of(matrix)
        alike = ranks[(self._parts[ranks] == self._parts[rank]).all(1)]
        return rank == (owner if owner in alike else alike[0])


def gather_holders(
    shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, LocalSlice], group: dist.ProcessGroup | None
) -> dict[str, Holders]:
    """The holders of every parameter in ``shapes``, from what each rank of ``group`` says it has. A collective call.

    Args:
        shapes: Of the whole parameters, in the same order on all ranks.
        boxes: This rank's parts; a parameter that it holds nothing of may be left out.
        group: ``None`` where this rank holds everything.
    """
    ranks = group.size() if group else 1
    names, found = list(shapes), {}
    at_once = max(1, _GATHERED_BYTES // (ranks * 6 * 8))
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        rows = torch.zeros(len(some), 2, 3, dtype=torch.int64)
        for row, name in zip(rows, some, strict=True):
            if name in boxes:
                offset, shape = boxes[name]
                row[0, -len(offset) :], row[1, -len(shape) :] = torch.tensor(offset), torch.tensor(shape)
        tables = _gathered(rows, group).numpy()  # (ranks, parameters, 2, 3)
        for number, name in enumerate(some):
            found[name] = Holders(shapes[name], tables[:, number, :, 3 - len(shapes[name]) :])
    return found


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Every rank's ``mine``, on the CPU, with a dimension for the ranks before its own."""
    if group is None:
        return mine[None]
    device = device_of_messages(group)
    whole = torch.empty(group.size() * mine.numel(), dtype=mine.dtype, device=device)
    all_gather_single(whole, mine.flatten().to(device), group)
    return whole.cpu().view(group.size(), *mine.shape)


def owners_of(
    matrices: Sequence[Matrix], holders: Mapping[str, Holders], costs: Sequence[float], ranks: int
) -> list[int]:
    """The owner of each matrix, by what everybody holds of it: see ``phalanx.model.facts.holdings``."""
    whole_on = [holders[matrix.parameter].whole_on(matrix) for matrix in matrices]
    return deal_matrices(costs, whole_on, [0.0] * ranks)
